"""Parts that the networks of all families are made of.

adaptable           what linears and networks know of the adapters that `dit.lora` gives them; what
                    Megatron-Core must know of weights that tensor ranks share
parallel_linear     the choice of linear, which is where tensor parallelism enters; feed-forward
experts             feed-forwards that a router weighs for each token
transformer_engine  Transformer Engine's linears and 8-bit products
modulation          timestep embedding, and adaLN in its published forms
per_sample          scale, shift and gate of a level row, taken by its tokens; rows of other tables
token_refiner       attention among the tokens of a caption before all other layers
queries_and_keys    their RMSNorm, per head or across heads, and rotary positions on any axes
context_parallel    attention over context ranks: all-to-all, all-gather, a ring
layer_text          text of which each layer sees another projection
joint_order         latents and text in rows of their own, and the order of both together
packed_attention    self-attention, cross-attention and joint attention with their weights
"""
