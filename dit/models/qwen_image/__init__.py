"""Qwen-Image and Qwen-Image-Edit, with the arithmetic of Diffusers' `QwenImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: double-stream layers; positions of text lie outside those of pictures
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
