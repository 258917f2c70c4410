"""Low-rank adapters (LoRA) in the networks of all families.

dropout   on the input of adapters, the same on every layout
frozen    the matrix of a linear that no step changes, in 8 bits or elsewhere
adapter   A and B beside a linear, on every layout
targets   which linears get one, by the names that Diffusers has for them; into a network with them
factors   A and B of our linears <-> those of Diffusers' modules
"""
