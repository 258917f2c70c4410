"""Samples, encoded -> tar shards, their indices, the ledger, and a dataset that Energon reads.

dataset_folder  the dataset folder: emptied before a packing, published after it
readme          the card for people, with sample pictures beside it
pack_options    what does not change the content of samples: sizes of shards, what may be refused
shard_writer    results of the workers -> shards and ledger
tar_shards      samples -> tar shards with their indices
ledger          what a packing has written, so that it is continued, copied from and summed up
"""
