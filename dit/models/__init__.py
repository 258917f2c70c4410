"""Networks (denoisers), which map the noisy tokens of a pack to predictions.

A network is a list of stacks, and a stack a list of equal layers; pipeline stages divide the list.
The networks get their process groups as arguments and never ask for a global rank.

family            the description of a family
registry          the table of all families
diffusers/        each family's class in Diffusers: tensor names, config.json, pipelines
positions         latents <-> tokens of one sample; position rules of tokens
patch_layout      patch size, positions and inputs with which a sample becomes tokens of a pack
layer_spec/       sizes and choices of layers and stacks
kernels/          fused GPU kernels for the operations between matrix products
attention/        attention inside each sample of a pack, and its kernels
layers/           parts: linears, norms, positions, modulation, attention
stacks/           layers made of parts, stacks made of layers, networks made of stacks
joint/            shared parts of families with joint attention
compilation       torch.compile, with a cache folder for each model of processor
pass_work         FLOPs of a pass by the lengths of samples, from coefficients of `dit/sizing`
linears           groups of linears (attention, MLP, modulation); FLOPs of Muon's updates
parameter_groups  weights that are frozen or have their own learning rate, by patterns of names

Each other folder is a model family, with the same four files; `registry.FAMILIES` lists all
families. To add a family, copy the folder of the most similar one: docs/developing.md, "A model
family, file by file".

family      fields of `model`, named sizes, rules; inputs of a sample; layers; imports no torch
model       the network
diffusers   the same network in Diffusers: names of tensors, config.json, pipelines
__init__    the docstring that lists these files
"""
