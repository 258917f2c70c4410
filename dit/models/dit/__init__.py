"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family      fields, sizes, rules; inputs; layers, from which parameters and operations follow
model       the network: one row of latents, cross-attention to text, low-rank adaLN, positions
diffusers   names of tensors, config.json, pipelines, names in other projects
pipelines   what the pipelines of Diffusers feed it
conditioner Anima's conditioner as a part of the network: what it costs, and reads of a sample

conditioner_layers has its layers, conditioner_form its names of tensors and config.json.
"""
