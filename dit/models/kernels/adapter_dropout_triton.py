"""Triton kernel of `adapter_dropout`.

The form in plain torch hashes in int64. The kernel hashes 31-bit words in int32: a product that
overflows keeps its lower 32 bits, and both forms use only 31 of them.
"""

# ruff: noqa: PLR0913  # a kernel takes its tensors and sizes one by one
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x):
    """The 31-bit hash of `x`, int32; `_mixed` in `dit.lora.adapter` computes the same."""
    x = x & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x05EBCA6B) & 0x7FFFFFFF
    x = ((x ^ (x >> 13)) * 0x42B2AE35) & 0x7FFFFFFF
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["rows", "key_low", "key_high", "first"])  # they change all the time
def adapter_dropout_masked(
    x,  # [T, I], contiguous
    place,  # [T], int64
    out,  # out [T, I]
    rows,
    channels,
    key_low,  # 31 bits
    key_high,
    first,  # index of the first channel
    threshold,  # numbers whose hash is below it are dropped
    factor,  # of numbers that are kept, float32
    ADDED: tl.constexpr,  # whether the result is added to `out`
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = (tl.load(place + row, row < rows, 0) & 0x7FFFFFFF).to(tl.int32)
    row_hash = mixed(mixed(word ^ key_low) ^ key_high)
    column = tl.arange(0, BLOCK)
    begin = 0
    while begin < channels:
        hashed = mixed(row_hash[:, None] ^ mixed(first + column)[None, :])
        inside = (row < rows)[:, None] & (column < channels)[None, :]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        # A product with zero, as in plain torch: it keeps signs of zeros, NaN and infinity.
        kept = tl.where(hashed >= threshold, factor, 0.0)
        number = tl.load(x + at, inside, 0.0).to(tl.float32)
        result = (number * kept).to(out.dtype.element_ty)
        if ADDED:
            before = tl.load(out + at, inside, 0.0).to(tl.float32)
            result = (before + result.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + at, result, inside)
        column += BLOCK
        begin += BLOCK
