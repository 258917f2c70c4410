"""Networks (denoisers), which map the noisy tokens of a pack to predictions.

A network is a list of stacks, each with layers of one kind; pipeline stages divide the list. A
network is built with its process groups; nothing here asks for a global rank.

family            the description of a family
registry          the table of all families
diffusers/        Diffusers' counterparts of a family's networks; tensor names, config.json
positions         latents <-> tokens, one sample at a time; rules that give tokens their positions
patch_layout      how a sample becomes tokens of a pack, from its family and the run
layer_spec/       sizes and choices of layers and stacks
kernels/          fused GPU kernels for the operations between matrix products
attention/        attention inside each sample of a pack, and its kernels
layers/           parts: linears, norms, positions, modulation, attention
stacks/           layers made of parts, stacks made of layers, networks made of stacks
joint/            shared parts of families with joint attention
compilation       torch.compile with kernels for this processor only
pass_work         FLOPs of a pass by the lengths of samples, from coefficients of `dit/sizing`
linears           which matrices are linears of attention, MLP or modulation; Muon's work on them
parameter_groups  weights with separate settings, or frozen, by patterns of names

Each other folder is a family, with the same four files; `registry.FAMILIES` lists them. To add one,
copy the folder of the nearest: docs/developing.md, "A model family, file by file".

family      fields of `model`, named sizes, rules; inputs of a sample; layers; no torch
model       the network
diffusers   the same network in Diffusers: names of tensors, config.json, pipelines
__init__    the docstring that lists these files
"""
