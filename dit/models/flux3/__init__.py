"""FLUX.3 klein, with the arithmetic of Diffusers' `Flux3Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: separate layers for text, picture and references, then joint layers
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
