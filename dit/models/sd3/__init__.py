"""Stable Diffusion 3 and 3.5, with the arithmetic of Diffusers' `SD3Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: double-stream layers over text and latents with added positions
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
