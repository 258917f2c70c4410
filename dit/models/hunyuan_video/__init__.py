"""HunyuanVideo (the first), as Diffusers' `HunyuanVideoTransformer3DModel` computes it.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
model           the network: the token refiner, double-stream layers, then single-stream ones
diffusers       names of tensors, config.json and pipelines
"""
