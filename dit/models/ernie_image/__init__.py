"""ERNIE-Image and its Turbo, with the arithmetic of Diffusers' `ErnieImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: layers over latents and text, which all share one modulation
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
