"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
model           the network: one row of latents, cross-attention to text, low-rank adaLN, positions
pipelines       which pipelines of Diffusers run it, and what they feed it
diffusers       names of tensors and config.json of `CosmosTransformer3DModel`
original_names  names of linears in Cosmos' own code
"""
