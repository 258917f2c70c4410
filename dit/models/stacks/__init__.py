"""Layers made of steps, stacks made of layers, networks made of stacks.

step_layer           a layer: the steps of its specification, over named rows of tokens
parts                the computations of steps: attention, feed-forward
views                the tokens of a row that a layer sees, and those that it changes
stack                layers of one kind: divided into pipeline stages, built, recomputed
offload              page-locked host memory, which a GPU reads and writes while it computes;
                     activations that are offloaded to it
frozen_blocks        frozen matrices in 8 bits, and blocks of them in host memory
token_routing        layers that see only some tokens in training; other tokens skip them
stacked_transformer  embed, stacks, head, and the tensors that pipeline stages send on
cross_transformer    networks with one row of latents and cross-attention to text
joint_transformer    networks that attend to latents and text jointly
refined_transformer  joint networks with refiners of each row, then layers over both (Lumina)
double_single_transformer  joint networks with double-stream, then single-stream layers (FLUX)
"""
