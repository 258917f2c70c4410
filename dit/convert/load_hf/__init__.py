"""Starts a run from a Diffusers folder (`checkpoint.load_hf`), without a copy of its weights.

settings   network and objective of the folder, which the user's keys override; contradictions
start      each rank reads its shards of the weights; digests of the files
"""
