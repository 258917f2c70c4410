"""HunyuanVideo 1.5, as Diffusers' `HunyuanVideo15Transformer3DModel` computes it.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: text, quoted words and picture in one row of text; double-stream layers
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
