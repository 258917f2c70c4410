"""A Diffusers folder that a run starts from (`checkpoint.load_hf`), without a copy of its weights.

settings   network and objective of the folder, below the keys that a person sets; what contradicts
start      each rank reads its parts of the weights; for `pretrain`, with the digest of the files
"""
