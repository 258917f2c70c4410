"""HunyuanVideo (the first), with the arithmetic of Diffusers' `HunyuanVideoTransformer3DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: a token refiner, double-stream layers, then single-stream ones
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
