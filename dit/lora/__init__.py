"""Low-rank adapters (LoRA) in the networks of all families, and their files.

Only runs with adapters import this folder; what networks know of it is in
`dit.models.layers.adaptable`.

adapter      A and B beside a linear, on every layout: products, dropout of their input
targets      which linears get an adapter, by Diffusers' names; adding adapters to a network
factors      A, B and alpha by Diffusers' modules, as our linears have them, and their fit
names        keys of files, and names of modules in the original projects
peft_config  peft's adapter_config.json: rank and alpha of each module
files        a file or folder -> factors, and factors -> a folder for Diffusers, peft and ComfyUI
checkpoint   which adapters a checkpoint holds, and which frozen weights they stand beside
frozen       adapters of a file that are added while others are trained

`dit.train.checkpoint.adapters` starts a run of them, `dit.convert.lora` converts checkpoints.
"""
