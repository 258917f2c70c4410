"""A run is opened in five steps, each of which returns a frozen value with its notes for the log.

1. machine   fit: the configuration, as the devices allow it
2. data      open_data: loader, validation packs, null inputs, dataset card
3. start     choose_start: run folder, checkpoint, base, what is trained
4. model     build: kernel of attention, network, optimizer
5. restore   restore: what the checkpoint holds, and the position in the data -> TrainState

checks       what each step refuses, for a dry run
"""
