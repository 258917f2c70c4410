"""Layers made of parts, stacks made of layers, networks made of stacks.

cross_layer          layers with cross-attention to text (Cosmos, Wan)
stream_layers        double-stream and single-stream layers (FLUX, Qwen-Image, HunyuanVideo)
sequential_layer     attention, then feed-forward, over either row or both (Lumina Image 2.0)
stack                layers of one kind: divided into pipeline stages, built, recomputed
offload              page-locked host memory, with which a GPU exchanges copies during its work;
                     activations that are offloaded to it
frozen_blocks        frozen matrices in 8 bits, and blocks of them that wait in host memory
token_routing        layers that see a part of the tokens in training; the others wait
stacked_transformer  embed, stacks, head, and the tensors that pipeline stages send on
cross_transformer    networks with one row of latents and cross-attention to text
joint_transformer    networks that attend to latents and text jointly
refined_transformer  joint networks with refiners of each row, then layers over both (Lumina)
layered_transformer  joint networks in which each layer sees another hidden state of text (HiDream)
double_single_transformer  joint networks with double-stream, then single-stream layers (FLUX)
"""
