"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

family              fields, sizes, rules; inputs; layers, from which parameters and FLOPs follow
model               the network: self-attention, cross-attention to text, low-rank adaLN
diffusers           names of tensors, config.json, pipelines, names in other projects
pipelines           the inputs that Diffusers' pipelines give the network
conditioner_layers  layers of Anima's conditioner, a small network that processes captions
conditioner_form    tensor names and config.json of the conditioner
"""
