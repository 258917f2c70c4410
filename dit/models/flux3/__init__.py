"""FLUX.3 klein, with the arithmetic of Diffusers' `Flux3Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: layers for text, picture and references alone, then layers over all of them
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
