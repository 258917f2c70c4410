"""Encodes blocks of the plan on many processes.

ranks         launched processes that share one output folder
processes     hands blocks to worker processes, or to workers of a Ray cluster
block_worker  a block of the plan -> the files of its samples
"""
