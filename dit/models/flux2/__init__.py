"""FLUX.2, with the arithmetic of Diffusers' `Flux2Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: FLUX's layers, with one modulation for all layers of a stack
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
