"""Low-rank adapters (LoRA) in the networks of all families, and their files.

Only runs with adapters import this folder; networks know adapters only through
`dit.models.layers.adaptable`.

adapter      A and B added to a linear, on every layout: products, dropout of the input
targets      which linears get an adapter, by Diffusers' names; adding adapters to a network
factors      A, B and alpha of Diffusers' modules, in the form of this project's linears; fit
names        keys of files, and names of modules in the original projects
peft_config  peft's adapter_config.json: rank and alpha of each module
files        reads a file or folder, and writes a folder for Diffusers, peft and ComfyUI
checkpoint   the adapters of a checkpoint, and the frozen weights they belong to
frozen       adapters of a file that are added, unchanged, while others are trained

`dit.train.checkpoint.adapters` starts a run with adapters, `dit.convert.lora` converts checkpoints.
"""
