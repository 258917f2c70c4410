"""FLUX.1, with the arithmetic of Diffusers' `FluxTransformer2DModel`.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
model           the network: double-stream layers, then single-stream ones
diffusers       names of tensors, config.json and pipelines of `FluxTransformer2DModel`
"""
