"""Parts that the networks of all families are made of.

activation_offload  Activations that wait in the host's memory until the backward pass asks for
attention           Attention inside each sample of a pack.
compile             Regions between matrix products that `model.compile` fuses into one kernel e
context_parallel    Self-attention over context ranks, each of which holds a part of every sampl
init                Initial values that depend on the seed and on a weight's name, never on the
parallel_linear     The choice of linear layer, and Megatron-Core's view of the configuration.
per_sample          What tokens take from the samples that they belong to: a row of their sample
qk_norm             RMSNorm of queries and keys, per head.
ring_attention      Transformer Engine's own attention over context ranks: keys and values go ro
rope                Where a token stands in its sample: rotary positions, and learnable ones.
transformer_engine  Transformer Engine's linear layers, 8-bit products and attention, for GPUs t
"""
