"""HunyuanImage 2.1, as Diffusers' `HunyuanImageTransformer2DModel` computes it.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: double-stream layers, then single-stream ones
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
