"""LTX-2.0, 2.3 and 2.5, with the arithmetic of Diffusers' `LTX2VideoTransformer3DModel`.

family      fields, sizes, rules; inputs; layers, from which parameters and operations follow
connectors  layers over captions, before the network
layers      modules that no other family has in a layer: LTX-2's tables, and attention to captions
model       the network: a row of latents and one of sound, which attend to each other
diffusers   names of tensors, config.json, pipelines, names in other projects
"""
