"""Metrics of a run, and the files to which they are written.

step_metrics        every step: seconds of its parts, and sums over all ranks
interval_metrics    every log_interval steps: loss by noise level, lengths of samples
norms               every log_interval steps: norms of weights, gradient and update
target              the loss at which a run ends
run_logger          decides which values are written where
writers             metrics.jsonl, TensorBoard, W&B and the terminal, with small pictures
mlperf_log          log in MLPerf Training's form, for FLUX.1
jsonl               files with one JSON object on each line
"""
