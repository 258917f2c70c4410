"""Wan 2.1 and 2.2, with the arithmetic of Diffusers' `WanTransformer3DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: self-attention, cross-attention to text and image, table modulation
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
