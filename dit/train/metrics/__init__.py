"""What a run measures and writes down.

step_metrics        every step: seconds of its parts, and sums over all ranks
interval_metrics    every log_interval steps: loss by noise level, norms, lengths of samples
target              the loss at which a run ends
run_logger          decides what is written where
writers             metrics.jsonl, TensorBoard, W&B and the terminal, with pictures of half blocks
mlperf_log          lines of MLPerf Training's FLUX.1
jsonl               files with one JSON object a line
"""
