"""LTX-Video 0.9, with the arithmetic of Diffusers' `LTXVideoTransformer3DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: self-attention, cross-attention to text, table modulation
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
