"""OmniGen2, with the arithmetic of its public code (`OmniGen2Transformer2DModel`).

family     fields, sizes, rules; inputs; layers, from which parameters and operations follow
model      the network: refiners of target, of references and of text, then joint layers
diffusers  names of tensors, config.json, pipelines, calls of Diffusers' network
"""
