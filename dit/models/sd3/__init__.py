"""Stable Diffusion 3 and 3.5, with the arithmetic of Diffusers' `SD3Transformer2DModel`.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
model           the network: double-stream layers, behind a table of positions
diffusers       names of tensors, config.json and pipeline of `SD3Transformer2DModel`
"""
