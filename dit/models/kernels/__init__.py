"""Triton kernels that fuse the operations between matrix products, on GPUs.

Each operator also exists in plain torch (`layers/per_sample`, `layers/queries_and_keys`): CPUs use
it, and tests compare the kernel with it; `layers/per_sample.kernels_run_on` chooses. Triton is
imported when the first kernel runs, so it is not needed on machines where none does.

gated_norm            gated residual, norm, scale and shift by noise level, with their gradients;
                      chunks of tokens by noise level, for sums in a fixed order
gated_norm_triton     its kernels
adapter_dropout       dropout on the input of adapters
adapter_dropout_triton  its kernel
rotated_heads         RMSNorm of each head and rotary positions of queries and keys
rotated_heads_triton  its kernels
across_heads          RMSNorm over all heads of a token, with or without rotary positions
across_heads_triton   its kernels
row_gradient          the gradient of values, written next to those of queries and keys
restored_rows         matrices in 8 bits, dequantized for products
restored_rows_triton  its kernel
traffic               bytes that the loads and stores of each operator move
"""
