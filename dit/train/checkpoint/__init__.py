"""The whole run on disk, and how it goes on from there.

async_save     Writing a checkpoint, in the background where asked for; nobody sees it before it
compatibility  The configuration of a checkpoint beside that of this run: what may differ, and w
distcp         Megatron-Core's sharded checkpoint in three acts, the second of which needs no ot
manifest       manifest.json of a checkpoint: its format, and the size and checksum of each of i
paths          Which checkpoint a path means, whether it is whole, and what to do where it is no
resume         A run and its checkpoints: where it goes on from, and when it is saved.
run_folder     The folder that a run is written to, which is its own while it lasts.
state_dict     The whole run on disk: weights, averages, optimizer, position in the data, config
"""
