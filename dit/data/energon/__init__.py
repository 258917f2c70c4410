"""All that touches Energon, its public and its private members.

flops_balancing   Which of the packs in waiting is next, so that all ranks train packs of like c
packing_stages    The links of Energon's chain that make groups of samples, each to become a pac
pipeline          Energon's chain of datasets for one rank, from folders or mock data to a loade
readers           The first links that we add to Energon's chain of datasets: from shards to sam
resumable_loader  Energon's savable loader where it would hang, die of a signal, or resume at th
task_encoder      Energon's task encoder: shard record -> PackedBatch, in the loader's processes
worker_output     The last link of a reader: packs on their way to the main process, with counts
worker_shards     Which samples a reader reads: its share of each dataset, and what other reader
"""
