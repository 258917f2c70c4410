"""Parts that the networks of all families are made of.

activation_offload  Activations that are kept in host memory between the forward and the backwar
attention           Attention inside each sample of a pack.
compile             torch.compile for the element-wise work between matrix products (`model.comp
context_parallel    Self-attention over context ranks, each of which holds a part of every sampl
feed_forward        The feed-forward of a layer: two linears with an activation between them.
init                Initial values that depend on the seed and on a weight's name, never on the
joint_order         Latents and text in rows of their own, and the order in which attention take
modulation          How the noise level steers the network: its embedding, and adaLN in its publ
packed_attention    Attention modules: queries, keys and values of packed tokens, attention, out
parallel_linear     The choice of linear layer, and Megatron-Core's view of the configuration.
per_sample          Broadcasts scale, shift and gate [N, D] of samples to tokens [T, D].
qk_norm             RMSNorm of queries and keys, per head or across all heads.
ring_attention      Ring attention of Transformer Engine: context ranks pass keys and values on
rope                Rotary positions (RoPE, arXiv:2104.09864) on any number of axes.
transformer_engine  Transformer Engine's linear layers, 8-bit products and attention, for GPUs t
"""
