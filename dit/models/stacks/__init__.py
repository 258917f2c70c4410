"""Layers made of steps, stacks made of layers, networks made of stacks.

step_layer           a layer: the steps of its specification, over named rows of tokens
parts                what the parts of steps compute: attention, feed-forward
views                what a layer sees in the place of a row, and which tokens it writes
stack                layers of one kind: cut into pipeline stages, built, recomputed
offload              page-locked host memory, from and to which a GPU copies beside its work;
                     activations that wait there
frozen_blocks        frozen matrices in 8 bits, and blocks of them that wait in host memory
token_routing        layers that see a part of the tokens in training; the others wait
stacked_transformer  embed, stacks, head, and the tensors that pipeline stages send on
cross_transformer    networks with one row of latents and cross-attention to text
joint_transformer    networks that attend to latents and text jointly
refined_transformer  joint networks with refiners of each row, then layers over both (Lumina)
double_single_transformer  joint networks with double-stream, then single-stream layers (FLUX)
"""
