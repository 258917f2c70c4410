"""Triton kernel of `restored_rows`.

The kernel assembles the bits of float32 numbers from bytes, because Triton supports float8_e4m3fn
only on GPUs from sm_89 on.
"""

# ruff: noqa: PLR0913  # a kernel takes its tensors and sizes one by one
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def restored_rows(
    narrow,  # [O, I], uint8
    exponents,  # [O], uint8
    out,  # out [O, I]
    rows,
    width,
    stride,  # of the rows of `narrow`
    exponent_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    inside = here[:, None] & (column < width)[None, :]
    exponent = tl.load(exponents + row.to(tl.int64) * exponent_stride, here, 127).to(tl.int32)
    # The shift is wrong for 2^-127, which is subnormal; `frozen_blocks` stores no such scale.
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    byte = tl.load(narrow + at, inside, 0).to(tl.int32)
    size = byte & 0x7F
    # 4 bits of exponent with bias 7, and 3 bits of mantissa.
    normal = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    small = size.to(tl.float32) * 0.001953125  # 2^-9: subnormal numbers
    number = tl.where(size < 8, small, normal)
    number = tl.where(size == 0x7F, float("nan"), number)
    number = tl.where(byte >= 0x80, -number, number) * factor[:, None]
    out_at = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + out_at, number.to(out.dtype.element_ty), inside)
