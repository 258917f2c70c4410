"""Training: one optimizer step, and the loop around it.

1. build.py        configuration -> model under DDP, optimizer
2. step.py         packs -> loss, gradients, one update
3. ema.py          the average of the weights
   learner.py      model, optimizer and average in one: the two halves of a step
4. validation.py   held-out packs -> loss, for the weights and their average
   rounds.py       a validation: losses, then samples, with their seconds
   sampling.py     the model of a round, for whoever writes its samples
5. checkpoint.py   the whole run on disk, and back; progress.py: what it counts
6. locate.py       a path -> the checkpoint it means
7. sums.py         the numbers of a step over all ranks
   skips.py        a step whose loss or gradient was not finite
   metrics.py      metrics.jsonl, TensorBoard, W&B, the line in the terminal
   refused.py      the samples that were left out
   record.py       who writes what, and when; lines.py: its files; environment.py: one of them
   gauges.py       what is read every log_interval steps: by_level.py, norms.py, seen.py
8. run_folder.py   where it is written, by one run at a time
   loop.py         all of it, in order, until the last step or a signal

The loop and the step are ours; schedules, DDP, distributed optimizer and sharded checkpoints are
Megatron-Core's.
"""
