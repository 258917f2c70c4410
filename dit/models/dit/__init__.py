"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family     what the registry is told
config     the family's own fields, named sizes and rules
stacks     its parts, as a description that parameters and operations follow from
model      the network: one row of latents, cross-attention to text, low-rank adaLN, its positions
diffusers  names of tensors, config.json and pipelines of `CosmosTransformer3DModel`
"""
