"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family     what the registry is told
config     the family's own fields, named sizes and rules
stacks     its layers, as a description that parameters and operations follow from
model      the network: noisy tokens of a pack in, prediction out
layer      one layer: self-attention, cross-attention and MLP, each modulated by the level
adaln      the level's embedding, and the adaLN of every layer
diffusers  names of tensors, config.json and pipelines of `CosmosTransformer3DModel`
"""
