"""What a run measures and writes down.

step_metrics        every step: seconds of its parts, and sums over all ranks
interval_metrics    every log_interval steps: loss by noise level, norms, lengths of samples
run_logger          decides what is written where
writers             metrics.jsonl, TensorBoard, W&B and the terminal, with pictures of half blocks
jsonl               files with one JSON object a line
"""
