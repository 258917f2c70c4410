"""Krea 2, Raw and Turbo, with the arithmetic of Diffusers' `Krea2Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: hidden states of the text are fused, then layers over latents and text
attention  attention with a gate, among tokens or among the hidden states of each token
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
