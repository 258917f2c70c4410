"""Lumina Image 2.0, with the arithmetic of Diffusers' `Lumina2Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: refiners of latents and of text, then joint layers
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
