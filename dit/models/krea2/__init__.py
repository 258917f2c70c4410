"""Krea 2, Raw and Turbo, with the arithmetic of Diffusers' `Krea2Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: fusion of the text's hidden states, then layers over latents and text
attention  attention with an output gate, among tokens or among the hidden states of a token
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
