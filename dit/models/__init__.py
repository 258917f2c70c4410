"""Networks: noisy tokens of a pack in, prediction out.

A network is a list of stacks, each with layers of one kind; pipeline stages cut the list. What is
described here is written for one device: nothing asks for a rank.

1. family.py                what a family says of itself, and the registry of all families
2. positions.py             rules that give tokens their positions
3. layer_spec.py            sizes and choices of layers and stacks, their cost, the cut into stages
4. parallel_linear.py       the choice of linear, which is where tensor parallelism enters
5. transformer_engine.py    Transformer Engine's linears, 8-bit products and attention
6. modulation.py            the timestep embedding and adaLN: low rank, per block, table
7. per_sample.py            scale, shift and gate of samples, broadcast to their tokens
8. compile.py               what torch.compile fuses
9. qk_norm.py               RMSNorm of queries and keys, per head or across heads
10. rope.py                  rotary positions on any number of axes
11. attention.py             attention inside each sample of a pack, for CPUs and for GPUs
12. context_parallel.py     attention over context ranks
13. ring_attention.py       the same by Transformer Engine, keys and values going round
14. joint_order.py          latents and text in rows of their own, and the order of both together
15. packed_attention.py     self-attention, cross-attention and joint attention with their weights
16. feed_forward.py         two linears and an activation
17. cross_layer.py          layers with cross-attention to text (Cosmos, Wan)
18. stream_layers.py        double-stream and single-stream layers (FLUX, Qwen-Image, HunyuanVideo)
19. stack.py                layers of one kind: construction, recomputation, checkpoint names
20. activation_offload.py   activations that are kept in host memory
21. stage_state.py          what pipeline stages hand on
22. stacked_transformer.py  embed, stacks, head: what networks of all families have in common
23. joint_transformer.py    the same for networks that attend to latents and text together
24. init.py                 initial values that do not depend on the layout
25. layer_costs.py          descriptions of layers: which linears and attention they have
26. cost.py                 parameters and operations of a network, from its description
27. memory.py               memory of a device, from the description
28. diffusers_names.py      which tensors of Diffusers are which of ours: kinds of rows in a table

The folder `dit` is the first family, whose arithmetic is that of Diffusers'
`CosmosTransformer3DModel`.
"""
