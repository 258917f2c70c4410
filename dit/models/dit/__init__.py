"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

flops       Arithmetic of packed samples, from their true lengths: padding and recomputation do
model       The DiT: one row of latents, cross-attention to text, low-rank adaLN (Cosmos).
pack_flops  Arithmetic of a pack that is ready for the model.
positions   Positions of Cosmos: rotary ones with NTK scaling, and learnable ones.
size        How many parameters a model has, exactly, and how much memory a run takes, roughly.
"""
