"""HunyuanVideo 1.5, with the arithmetic of Diffusers' `HunyuanVideo15Transformer3DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: double-stream layers of latents and text; text includes quoted words and
           a picture's embedding
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
