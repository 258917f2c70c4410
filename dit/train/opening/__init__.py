"""The start of a run in five steps, each of which returns a frozen value with notes for the log.

1. machine   fit: the configuration, adjusted to the devices
2. data      open_data: loader, validation packs, null inputs, dataset card
3. start     choose_start: run folder, checkpoint, base, trained weights
4. model     build: attention kernel, network, optimizer
5. restore   restore: the `TrainState`, with the checkpoint's content and the position in the data

checks       makes the checks of each step for a dry run
"""
