"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
model           the network: one row of latents, cross-attention to text, low-rank adaLN, positions
diffusers       names of tensors and config.json of `CosmosTransformer3DModel`
"""
