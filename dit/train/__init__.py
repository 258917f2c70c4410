"""Training: the loop over steps, and all that a run measures, validates and saves.

opening                a run is opened in five steps: machine, data, start, model, restore
trainer                the run: read, step, average, validate, log, save
train_state            everything that a run holds in memory
model_and_optimizer    configuration -> model, optimizer and average of the weights; initial values
step                   packs -> loss and gradients -> updated weights
loss                   error of a prediction, weighted as the objective says; the loss of pairs
reference_passes       passes without gradients before the one that learns
references             what these predict, and what it makes of the problems of a step
distill                few steps: a student, its teacher, and the problems that they make
timers                 the seconds of the parts of a step
attention_choice       the kernel of attention: kept, or the fastest on the first rank
optimizer              which one trains which weights, one clipped update, what it keeps
validation             held-out packs -> loss; samples of the averaged model
memory                 what a full device held, and the keys that need less; Python's garbage,
                       collected at fixed steps
metrics                what is measured, and where it is written
checkpoint             the run on disk, and how it continues from there

Schedules, data parallelism, the distributed optimizer and sharded checkpoints are Megatron-Core's.
"""
