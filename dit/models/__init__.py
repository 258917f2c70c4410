"""Networks: noisy tokens of a pack in, prediction out.

A network is a list of stacks, each with layers of one kind; pipeline stages cut the list. What is
described here is written for one device: nothing asks for a rank.

family           what a family says of itself, and the registry of all families
positions        rules that give tokens their positions
layer_spec       sizes and choices of layers and stacks, their cost, the cut into pipeline stages
layers/          parts: linears, norms, positions, modulation, attention
stacks/          layers made of parts, stacks made of layers, networks made of stacks
dit/             the first family: the DiT, with the arithmetic of `CosmosTransformer3DModel`
layer_costs      descriptions of layers: which linears and attention they have
cost             parameters and operations of a network, from its description
memory           memory of a device, from the description
diffusers_names  which tensors of Diffusers are which of ours: kinds of rows in a table
"""
