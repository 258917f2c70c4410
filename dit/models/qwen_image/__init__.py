"""Qwen-Image and its editing forms, as Diffusers' `QwenImageTransformer2DModel` computes them.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
positions       rows and columns counted from the middle of a picture, text outside of all pictures
model           the network: double-stream layers alone
diffusers       names of tensors, config.json and pipelines of `QwenImageTransformer2DModel`
"""
