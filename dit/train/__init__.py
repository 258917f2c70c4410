"""Training: one optimizer step, and the loop around it.

trainer                the run: read, step, average, validate, log, save
train_state            everything that a run holds in memory, and how far it has come
model_and_optimizer    configuration -> model, optimizer and average of the weights
step                   packs -> loss and gradients -> updated weights
optimizer              AdamW, its learning rate schedule, and one clipped update
main_params            the float32 parameters that this rank's optimizer updates
ema                    the average of the weights
validation             held-out packs -> loss; samples of the averaged model
metrics                what is measured and written down
checkpoint             the whole run on disk, and back
"""
