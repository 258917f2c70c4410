"""Chroma1, with the arithmetic of Diffusers' `ChromaTransformer2DModel`: FLUX with less modulation.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: FLUX's layers, and a small network that computes all modulation vectors
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
