"""HunyuanImage 2.1, with the arithmetic of Diffusers' `HunyuanImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: double-stream layers, then single-stream ones
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
