"""Networks: noisy tokens of a pack in, prediction out.

A network is a list of stacks, each with layers of one kind; pipeline stages cut the list. What is
described here is written for one device: nothing asks for a rank.

1. layer_spec.py            sizes and choices of layers and stacks, their cost, the cut into stages
2. parallel_linear.py       the choice of linear, which is where tensor parallelism enters
3. transformer_engine.py    Transformer Engine's linears, 8-bit products and attention
4. modulation.py            the timestep embedding and adaLN: low rank, per block, table
5. per_sample.py            scale, shift and gate of samples, broadcast to their tokens
6. compile.py               what torch.compile fuses
7. qk_norm.py               RMSNorm of queries and keys, per head or across heads
8. rope.py                  rotary positions on any number of axes
9. attention.py             attention inside each sample of a pack, for CPUs and for GPUs
10. context_parallel.py     attention over context ranks
11. ring_attention.py       the same by Transformer Engine, keys and values going round
12. joint_order.py          latents and text in rows of their own, and the order of both together
13. packed_attention.py     self-attention, cross-attention and joint attention with their weights
14. feed_forward.py         two linears and an activation
15. cross_layer.py          layers with cross-attention to text (Cosmos, Wan)
16. stream_layers.py        double-stream and single-stream layers (FLUX, Qwen-Image, HunyuanVideo)
17. stack.py                layers of one kind: construction, recomputation, checkpoint names
18. activation_offload.py   activations that are kept in host memory
19. stage_state.py          what pipeline stages hand on
20. stacked_transformer.py  embed, stacks, head: what networks of all families have in common
21. joint_transformer.py    the same for networks that attend to latents and text together
22. init.py                 initial values that do not depend on the layout

The first family, the DiT, whose arithmetic is that of Diffusers' `CosmosTransformer3DModel`:

23. dit.py                  its layers, embedders and head
24. positions.py            its rotary and learnable positions
25. flops.py                operations of a pack
"""
