"""Modules of which the networks of all families consist.

adaptable           the interface between linears and the adapters of `dit.lora`; attributes by
                    which Megatron-Core recognises weights that tensor ranks divide
parallel_linear     the choice of linear, which is where tensor parallelism enters; feed-forward
transformer_engine  Transformer Engine's linears and 8-bit products
modulation          timestep embedding, and adaLN in its published forms
per_sample          scale, shift and gate by noise level, applied to tokens; lookup in small tables
token_refiner       attention among the tokens of a caption before all other layers
queries_and_keys    RMSNorm of queries and keys, per head or across heads, and rotary positions
context_parallel    attention over context ranks: all-to-all, all-gather, a ring
joint_order         latents and text in separate rows, and the joint order of both
packed_attention    self-attention, cross-attention and joint attention with their weights
across_attention    attention of one row of tokens to another row of another width
"""
