"""Training: the loop over steps, and what a run measures, validates and saves.

opening                a run is opened in five steps: machine, data, start, model, restore
trainer                the run: read, step, average, validate, log, save
train_state            everything that a run holds in memory
model_and_optimizer    builds model, optimizer and EMA from the configuration; initial values
step                   a training step: packs, loss and gradients, updated weights
loss                   error of a prediction, weighted as the objective says; the loss of pairs
reference_passes       forward passes without gradients before those with gradients
references             predictions of these passes, and how they change the problems of a step
distill                distillation to few steps: a student, its teacher, and their problems
timers                 seconds spent in each part of a step
attention_choice       the attention kernel: the checkpoint's, or the fastest on the first rank
optimizer              the optimizer of each weight, one clipped update, optimizer states
validation             loss of held-out packs; samples of the averaged model
memory                 contents of a full device, and keys that save memory; Python's garbage
                       collection at fixed steps
metrics                measured values, and where they are written
checkpoint             the run on disk, and how it resumes

Schedules, data parallelism, the distributed optimizer and sharded checkpoints are Megatron-Core's.
"""
