"""Samples -> tar shards, their indices and the ledger.

atomic_files    Files that appear whole or not at all.
dataset_folder  The dataset folder: made empty before, made readable after.
ledger          What a run has written, so that the same command continues it after any end.
shard_writer    Results -> shards and ledger: the one place that writes samples.
tar_shards      Samples -> tar shards with their indices, each appearing whole.
"""
