"""LTX-2.0, 2.3 and 2.5, with the arithmetic of Diffusers' `LTX2VideoTransformer3DModel`.

`DIT_FAMILIES=ltx2=dit.models.ltx2.family:FAMILY` registers it. The registry leaves it out until its
videos have been compared with those of Diffusers' pipelines.

family      fields, sizes, rules; inputs; layers, from which parameters and operations follow
connectors  layers over captions, before the network
layers      modules that no other family has in a layer: LTX-2's tables, and attention to captions
model       the network: a row of latents and one of sound, which attend to each other
diffusers   names of tensors, config.json, pipelines, names in other projects
"""
