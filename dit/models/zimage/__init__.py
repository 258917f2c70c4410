"""Z-Image and Z-Image-Turbo, with the arithmetic of Diffusers' `ZImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: refiners of latents and of text, then joint layers
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
