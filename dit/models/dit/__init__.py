"""The first family: the DiT with cross-attention to text, with Cosmos's arithmetic.

adaln       How the noise level steers the network: its embedding, and adaLN.
flops       Arithmetic of packed samples, from their true lengths: padding and recomputation do
layer       One layer of the DiT: self-attention, cross-attention and MLP, each modulated by the
model       The diffusion transformer.
pack_flops  Arithmetic of a pack that is ready for the model.
size        How many parameters a model has, exactly, and how much memory a run takes, roughly.
"""
