"""This project's stages in Energon's chain of datasets, in the order of the data.

task_encoder       opens the chain for one rank; Energon's task encoder
shard_reader       reads records of shards, and reports damage as a record
worker_shards      the samples that each reader reads
internals          all private members of Energon that this project uses
stages             the stages of the chain: cook, group, order, output
resumable_loader   Energon's savable loader, made safe against dead workers and signals
validation_groups  the fixed list of validation packs, of which every rank reads its own
"""
