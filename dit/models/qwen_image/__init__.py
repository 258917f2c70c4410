"""Qwen-Image and its editing forms, as Diffusers' `QwenImageTransformer2DModel` computes them.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: double-stream layers alone; positions of text outside of all pictures
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
