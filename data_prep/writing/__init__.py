"""Writes what was packed: tar shards, indices, the ledger, and a dataset that Energon reads.

dataset_folder  the dataset folder: emptied before samples are packed, published after that
readme          the card for people, with sample pictures beside it
pack_options    options that do not change samples: shard sizes, how many may be refused
shard_writer    results of the workers -> shards and ledger
tar_shards      samples -> tar shards with their indices
ledger          the record of written samples, by which an interrupted run continues
"""
