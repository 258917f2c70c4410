"""Chroma1, with the arithmetic of Diffusers' `ChromaTransformer2DModel`: FLUX with less modulation.

family        the entry of the registry; the layers, from which parameters and operations follow
config        the family's own fields, named sizes and rules
approximator  the network that makes the modulations of all layers from the level
model         the network: double-stream layers, then single-stream ones
diffusers     names of tensors, config.json and the pipeline of `ChromaTransformer2DModel`
"""
