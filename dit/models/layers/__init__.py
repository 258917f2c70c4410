"""Modules of which the networks of all families consist.

adaptable           the interface between linears and the adapters of `dit.lora`; attributes by
                    which Megatron-Core recognises weights that tensor ranks divide
parallel_linear     linears with and without tensor parallelism; feed-forward
transformer_engine  Transformer Engine's linears and 8-bit products
modulation          timestep embedding, and adaLN in its published forms
per_sample          scale, shift and gate of tokens by their timestep; lookup in small tables
token_refiner       attention among the tokens of a caption, before all other layers
queries_and_keys    RMSNorm of queries and keys, per head or across heads, and rotary positions
context_parallel    attention over context ranks: all-to-all, all-gather or ring
joint_order         permutations between separate streams of latents and text and a joint sequence
packed_attention    modules of self-attention, cross-attention and joint attention
across_attention    attention from one stream of tokens to another, of another width
"""
