"""Wan 2.1 and 2.2, with the arithmetic of Diffusers' `WanTransformer3DModel`.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
conditions      what the network is told beside noisy latents: level, text, image, given frames
model           the network: one row of latents, cross-attention to text and image, table modulation
diffusers       names of tensors, config.json and pipelines of `WanTransformer3DModel`
"""
