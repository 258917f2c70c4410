"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family      fields, sizes, rules; inputs; layers, from which parameters and operations follow
model       the network: one row of latents, cross-attention to text, low-rank adaLN, positions
diffusers   names of tensors, config.json, pipelines, names in other projects
pipelines   the inputs that Diffusers' pipelines give it
conditioner Anima's conditioner as a part of the network: its inputs and memory

conditioner_layers has the conditioner's layers, conditioner_form its tensor names and config.json.
"""
