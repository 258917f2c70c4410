"""Ideogram 4, with the arithmetic of Diffusers' `Ideogram4Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: layers over text and picture, with interleaved rotary axes
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
