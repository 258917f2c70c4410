"""Layers made of steps, stacks made of layers, networks made of stacks.

step_layer           a layer: the steps of its specification, over named rows of tokens
parts                what the parts of steps compute: attention, feed-forward
views                what a layer sees in the place of a row, and which tokens it writes
stack                layers of one kind: cut into pipeline stages, built, recomputed
offload              page-locked host memory, from and to which a GPU copies beside its work;
                     activations that wait there
frozen_blocks        frozen matrices in 8 bits, and blocks of them that wait in host memory
token_routing        layers that see a part of the tokens in training; the others wait
stacked_transformer  embed, stacks, head, and what pipeline stages hand on
cross_transformer    the same for networks of one row of latents, with cross-attention to text
joint_transformer    the same for networks that attend to latents and text together
refined_transformer  of these, layers over either row alone, then over both (Lumina Image 2.0)
layered_transformer  of these, layers each of which sees another layer's text (HiDream)
double_single_transformer  of these, double-stream layers and then single-stream ones (FLUX, Chroma)
"""
