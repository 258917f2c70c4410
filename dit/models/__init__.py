"""Networks: noisy tokens of a pack in, prediction out.

A network is a list of stacks, each with layers of one kind; pipeline stages cut the list. What is
described here is written for one device: nothing asks for a rank.

layer_spec   sizes and choices of layers and stacks, their cost, the cut into pipeline stages
layers/      parts: linears, norms, positions, modulation, attention
stacks/      layers made of parts, stacks made of layers, networks made of stacks
dit/         the first family: the DiT, with the arithmetic of `CosmosTransformer3DModel`
"""
