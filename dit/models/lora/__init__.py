"""Low-rank adapters (LoRA) in the networks of all families.

dropout   on the input of adapters, the same on every layout
frozen    the frozen matrix of a linear, in 8 bits or in host memory
products  of adapters, which add to those of their linear
adapter   A and B beside a linear, on every layout
targets   which linears get an adapter, by Diffusers' names; adding adapters to a network
factors   A and B of our linears <-> those of Diffusers' modules
"""
