"""HunyuanVideo (the first), as Diffusers' `HunyuanVideoTransformer3DModel` computes it.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: the token refiner, double-stream layers, then single-stream ones
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
