"""FLUX.2, with the arithmetic of Diffusers' `Flux2Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: layers as in FLUX.1, but all layers of a stack share one modulation
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
