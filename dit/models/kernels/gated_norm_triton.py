"""Kernels of `gated_norm`.

A program has one slot of `RowChunks`: tokens of one level row, whose scale, shift and gate it reads
once. All arithmetic is in float32; each result is rounded once.
"""

# ruff: noqa: PLR0913, PLR0915  # a kernel takes its tensors, strides and sizes one by one
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece(slots, slot):
    """Level row of a slot, its first token and the one past its last, in sorted order."""
    return tl.load(slots + 3 * slot), tl.load(slots + 3 * slot + 1), tl.load(slots + 3 * slot + 2)


@triton.jit
def gated_norm_forward(
    h,  # [T, D], contiguous, as all tokens are
    y,  # [T, D], only if GATED
    gate,  # [N, D], its rows `gate_stride` apart
    scale,  # [N, D], only if NORM
    shift,  # [N, D], only if NORM
    order,
    slots,
    sum_h,  # out [T, D], only if GATED: h + gate · y
    x,  # out [T, D], only if NORM
    stats,  # out [T, 2], float32, only if NORM: mean and 1 / standard deviation
    gate_stride,
    scale_stride,
    shift_stride,
    EPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gated residual and modulated LayerNorm."""
    slot = tl.program_id(0)
    row, begin, end = piece(slots, slot)
    column = tl.arange(0, BLOCK)
    used = column < tl.where(begin < end, D, 0)  # a slot without tokens reads and writes nothing
    if GATED:
        gate_D = tl.load(gate + row * gate_stride + column, used, 0.0).to(tl.float32)
    if NORM:
        scale_D = tl.load(scale + row * scale_stride + column, used, 0.0).to(tl.float32)
        shift_D = tl.load(shift + row * shift_stride + column, used, 0.0).to(tl.float32)
    while begin < end:
        at = begin + tl.arange(0, TOKENS)
        token = tl.load(order + at, at < end, 0).to(tl.int64)
        inside = (at < end)[:, None] & (column < D)[None, :]
        place = token[:, None] * D + column[None, :]
        h_TD = tl.load(h + place, inside, 0.0).to(tl.float32)
        if GATED:
            y_TD = tl.load(y + place, inside, 0.0).to(tl.float32)
            sum_TD = (h_TD + gate_D[None, :] * y_TD).to(sum_h.dtype.element_ty)
            tl.store(sum_h + place, sum_TD, inside)
            # The norm is that of the rounded sum, which the backward pass reads.
            h_TD = sum_TD.to(tl.float32)
        if NORM:
            mean_T = tl.sum(h_TD, 1) / D
            centred_TD = tl.where(inside, h_TD - mean_T[:, None], 0.0)
            pace_T = 1 / tl.sqrt(tl.sum(centred_TD * centred_TD, 1) / D + EPS)
            x_TD = centred_TD * pace_T[:, None] * scale_D[None, :] + shift_D[None, :]
            tl.store(x + place, x_TD.to(x.dtype.element_ty), inside)
            tl.store(stats + 2 * token, mean_T, at < end)
            tl.store(stats + 2 * token + 1, pace_T, at < end)
        begin += TOKENS


@triton.jit
def gated_norm_backward(
    to_x,  # gradient of x, only if NORM
    to_sum,  # gradient of the tokens from beside the norm, only if RESIDUAL
    h,  # the tokens that were normalised, only if NORM
    y,  # only if GATED
    gate,
    scale,
    stats,
    order,
    slots,
    to_h,  # out [T, D], only if NORM; without it, it is `to_sum`
    to_y,  # out [T, D], only if GATED
    parts,  # out [S, P, D], float32: of shift and scale if NORM, then of gate if GATED
    gate_stride,
    scale_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Gradients of the tokens, and parts of those of the rows.

    With n the normalised tokens, r 1 / standard deviation, g = dL/dx, and a = g · scale:
    dL/dh = r · (a - mean(a) - n · mean(a · n)) + dL/dsum.
    """
    slot = tl.program_id(0)
    row, begin, end = piece(slots, slot)
    column = tl.arange(0, BLOCK)
    used = column < tl.where(begin < end, D, 0)  # a slot without tokens reads and writes nothing
    if GATED:
        gate_D = tl.load(gate + row * gate_stride + column, used, 0.0).to(tl.float32)
        to_gate_D = tl.zeros([BLOCK], tl.float32)
    if NORM:
        scale_D = tl.load(scale + row * scale_stride + column, used, 0.0).to(tl.float32)
        to_scale_D = tl.zeros([BLOCK], tl.float32)
        to_shift_D = tl.zeros([BLOCK], tl.float32)
    while begin < end:
        at = begin + tl.arange(0, TOKENS)
        token = tl.load(order + at, at < end, 0).to(tl.int64)
        inside = (at < end)[:, None] & (column < D)[None, :]
        place = token[:, None] * D + column[None, :]
        if NORM:
            g_TD = tl.load(to_x + place, inside, 0.0).to(tl.float32)
            h_TD = tl.load(h + place, inside, 0.0).to(tl.float32)
            mean_T = tl.load(stats + 2 * token, at < end, 0.0)
            pace_T = tl.load(stats + 2 * token + 1, at < end, 0.0)
            n_TD = (h_TD - mean_T[:, None]) * pace_T[:, None]
            to_shift_D += tl.sum(g_TD, 0)
            to_scale_D += tl.sum(g_TD * n_TD, 0)
            a_TD = g_TD * scale_D[None, :]
            mean_a_T = tl.sum(a_TD, 1) / D
            mean_an_T = tl.sum(a_TD * n_TD, 1) / D
            d_TD = (a_TD - mean_a_T[:, None] - n_TD * mean_an_T[:, None]) * pace_T[:, None]
            if RESIDUAL:
                d_TD += tl.load(to_sum + place, inside, 0.0).to(tl.float32)
            tl.store(to_h + place, d_TD.to(to_h.dtype.element_ty), inside)
        else:
            d_TD = tl.load(to_sum + place, inside, 0.0).to(tl.float32)
        if GATED:
            y_TD = tl.load(y + place, inside, 0.0).to(tl.float32)
            to_gate_D += tl.sum(d_TD * y_TD, 0)
            to_y_TD = d_TD * gate_D[None, :]
            tl.store(to_y + place, to_y_TD.to(to_y.dtype.element_ty), inside)
        begin += TOKENS
    part = parts + slot * ((2 if NORM else 0) + (1 if GATED else 0)) * D + column
    if NORM:
        tl.store(part, to_shift_D, used)
        tl.store(part + D, to_scale_D, used)
        part += 2 * D
    if GATED:
        tl.store(part, to_gate_D, used)


@triton.jit
def gated_norm_add_row_parts(
    parts,  # [S, P, D], float32
    rows,
    out,  # [P, N, D]
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Sums over the slots of a level row, first to last; zeros for a row without tokens."""
    row, kind, kinds = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(rows + 2 * row)
    count = tl.load(rows + 2 * row + 1)
    sum_D = tl.zeros([BLOCK], tl.float32)
    done = 0
    while done < count:
        slot = done + tl.arange(0, SLOTS)
        inside = (slot < count)[:, None] & (column < D)[None, :]
        place = ((first + slot) * kinds + kind)[:, None] * D + column[None, :]
        sum_D += tl.sum(tl.load(parts + place, inside, 0.0), 0)
        done += SLOTS
    place = (kind * tl.num_programs(0) + row) * D + column
    tl.store(out + place, sum_D.to(out.dtype.element_ty), column < D)
