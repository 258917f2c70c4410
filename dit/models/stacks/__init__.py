"""Modules that run layer specifications: layers, stacks of layers, and whole networks.

step_layer           a layer, which runs the steps of its specification
parts                modules for the parts of steps, such as attention and feed-forward
views                layers that process, or change, only some of the tokens
stack                layers with equal specifications: pipeline stages, recomputation
offload              activations in host memory, copied while the GPU computes
frozen_blocks        frozen matrices in 8 bits, and blocks of them in host memory
token_routing        layers that process only some tokens in training; other tokens skip them
stacked_transformer  networks: embedding, stacks, head; tensors sent between pipeline stages
cross_transformer    networks with self-attention of latents and cross-attention to text
joint_transformer    networks that attend to latents and text jointly
refined_transformer  joint networks with refiners of latents and of text (Lumina)
double_single_transformer  joint networks with double-stream, then single-stream layers (FLUX)
"""
