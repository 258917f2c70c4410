"""HiDream-I1, with the arithmetic of Diffusers' `HiDreamImageTransformer2DModel`.

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: double-stream layers, then sequential ones, with experts
diffusers  names of tensors, config.json, pipelines, running its network
"""
