"""The DiT: noisy tokens of a pack in, prediction out.

1. dit.py          patches and level in, layers, final modulation and output
2. layer.py        self-attention, cross-attention and MLP, each modulated by the level
3. modulation.py   the level's embedding and the adaLN of every layer
4. owners.py       what tokens take from their samples: scale, shift and gate
5. attention.py    attention inside each sample of a pack, for CPUs and for GPUs
6. head_norm.py    RMSNorm of queries and keys
7. positions.py    3-D rotary positions, learnable positions
8. linears.py      the choice of linear, which is where tensor parallelism enters
9. engine.py       Transformer Engine's linears, 8-bit products and attention
10. regions.py     what torch.compile fuses
11. offload.py     activations that wait in the host's memory
12. weights.py     initial values that do not depend on the layout

The arithmetic is that of Diffusers' `CosmosTransformer3DModel`. Written for one device: nothing
here asks for a rank.
"""
