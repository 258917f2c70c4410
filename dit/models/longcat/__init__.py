"""LongCat-Image, with the arithmetic of Diffusers' `LongCatImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: FLUX's layers, with pictures behind their text on rows and columns
diffusers  names of tensors, config.json, pipelines, and how its network is run
"""
