"""What a run measures and writes down.

data_stats           Which samples training reads: how long they are, and from which dataset.
device               What is asked of the device of this process.
environment          Where and with what a run was started.
interval_metrics     What is measured between two log steps and read at each: one all-reduce for
jsonl                Files that grow by one JSON object a step, and what is said where they cann
loss_by_noise_level  Training loss by quantile of the noise level, added up on the device betwee
norms                How large weights, gradient and update are, from the optimizer's own float3
refused_samples      Samples that the run has left out: which, and why.
run_logger           The record of a run: who writes what, and when.
skipped_steps        Steps whose loss or gradient was not finite: which samples were in them.
step_metrics         The numbers of a step, over all ranks of the run.
timers               Where the seconds of a step go: parts say when they begin and end, the step
writers              What a run writes down: metrics.jsonl, TensorBoard, W&B, and lines in the t
"""
