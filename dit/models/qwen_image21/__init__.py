"""Qwen-Image-2.1, with the arithmetic of Diffusers' `QwenImage21Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: a sequence of texts and pictures, each of which attends to those before it
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
