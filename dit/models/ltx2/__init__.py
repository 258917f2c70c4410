"""LTX-2.0, 2.3 and 2.5, with the arithmetic of Diffusers' `LTX2VideoTransformer3DModel`.

The registry leaves this family out until its videos have been compared with those of Diffusers'
pipelines; the environment variable `DIT_FAMILIES=ltx2=dit.models.ltx2.family:FAMILY` adds it.

family      fields, sizes, rules; inputs; layers, from which parameters and operations follow
connectors  layers that process captions before the network
layers      parts of layers that only LTX-2 has: modulation tables, attention to captions
model       the network: a stream of latents and a stream of sound, which attend to each other
diffusers   names of tensors, config.json, pipelines, names in other projects
"""
