"""Qwen-Image-2.1, with the arithmetic of Diffusers' `QwenImage21Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: layers over a sequence of texts and pictures, with block-causal attention
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
