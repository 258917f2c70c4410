"""Low-rank adapters (LoRA) in the networks of all families, and their files.

dropout         on the input of adapters, the same on every layout
products        of adapters, which add to those of their linear
adapter         A and B beside a linear, on every layout
targets         which linears get an adapter, by Diffusers' names; adding adapters to a network
stored          A and B of our linears <-> those of Diffusers' modules
factors         A, B and alpha of one linear; whether adapters fit a network
original_names  names of modules in the original projects -> those of Diffusers
keys            what each key of a file is: module, factor; what is refused, and why
patterns        rank and alpha of a module by the rules of peft's adapter_config.json
read            a folder or file -> factors by Diffusers' names of modules
write           factors -> one folder for Diffusers, peft and ComfyUI
"""
