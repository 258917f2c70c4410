"""Layers made of parts, stacks made of layers, networks made of stacks.

step_layer           layers of steps over named rows (cross-attention to text: Cosmos, Wan)
parts                what the parts of such layers compute
sequential_layer     attention, then feed-forward, over either row or both (Lumina Image 2.0)
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
