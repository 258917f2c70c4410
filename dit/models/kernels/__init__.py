"""Triton kernels for GPUs that fuse the operations between matrix products.

Each operator also exists in plain torch (`layers/per_sample`, `layers/queries_and_keys`): CPUs use
that form, and tests compare the kernel with it. `layers/per_sample.kernels_run_on` chooses. Triton
is imported when the first kernel runs, so machines that run no kernel do not need it.

gated_norm            gated residual, norm, scale and shift of tokens by their timestep; groups of
                      tokens by timestep, so that gradients are summed in a fixed order
adapter_dropout       dropout on the input of adapters
rotated_heads         RMSNorm of each head, and rotary positions, of queries and keys
across_heads          RMSNorm over all heads of a token, with or without rotary positions
restored_rows         dequantization of 8-bit matrices for matrix products
*_triton              the Triton kernels of the operators in the file without this suffix:
                      gated_norm_triton, adapter_dropout_triton, rotated_heads_triton,
                      across_heads_triton, restored_rows_triton
row_gradient          the gradient of values, written next to the gradients of queries and keys
traffic               bytes that each operator loads and stores
"""
