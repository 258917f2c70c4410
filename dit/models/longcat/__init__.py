"""LongCat-Image, with the arithmetic of Diffusers' `LongCatImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: FLUX's layers; positions of pictures start after those of their text
diffusers  names of tensors, config.json, pipelines, calls of Diffusers' network
"""
