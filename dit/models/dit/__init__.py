"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family      fields, sizes, rules; inputs; layers, from which parameters and operations follow
model       the network: one row of latents, cross-attention to text, low-rank adaLN, positions
diffusers   names of tensors, config.json, pipelines, names in other projects
pipelines   the inputs that Diffusers' pipelines give it

conditioner_layers has the layers of Anima's conditioner, a part of some of these networks;
conditioner_form has its tensor names and config.json.
"""
