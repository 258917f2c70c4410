"""Fused kernels in Triton for what lies between matrix products, on GPUs.

Each operator exists in a plain form of torch as well, which CPUs take and which the tests hold the
kernel against: `layers/per_sample` and `layers/queries_and_keys`. Triton is imported when the first
kernel runs, so that nothing of this asks for it where it is not used.

choice                where kernels run
row_chunks            tokens by level row, cut into chunks: who adds up what, in an order that holds
gated_norm            gated residual, LayerNorm, scale and shift by level row, with their gradients
gated_norm_triton     its kernels
rotated_heads         RMSNorm of each head and rotary positions of queries and keys
rotated_heads_triton  its kernels
traffic               bytes that the loads and stores of each operator move
"""
