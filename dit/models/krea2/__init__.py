"""Krea 2, Raw and Turbo, with the arithmetic of Diffusers' `Krea2Transformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: states of several text layers are fused, then layers over both rows
attention  attention with a gate, among tokens or among the states of each
diffusers  names of tensors, config.json, pipelines, names in other projects
"""
