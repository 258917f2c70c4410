"""Training: one optimizer step, and the loop around it.

1. build.py        configuration -> model under DDP, optimizer
2. step.py         packs -> loss, gradients, one update
3. ema.py          the average of the weights
4. validation.py   held-out packs -> loss, for the weights and their average
5. checkpoint.py   the whole run on disk, and back
6. locate.py       a path -> the checkpoint it means
7. metrics.py      metrics.jsonl, TensorBoard, W&B, the line in the terminal
8. loop.py         all of it, in order, until the last step or a signal

The loop and the step are ours; schedules, DDP, distributed optimizer and sharded checkpoints are
Megatron-Core's.
"""
