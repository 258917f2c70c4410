"""ERNIE-Image and ERNIE-Image-Turbo, by Diffusers' `ErnieImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: sequential layers over latents and text, which share one modulation
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
