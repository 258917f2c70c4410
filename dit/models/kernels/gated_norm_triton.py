"""Triton kernels of `gated_norm`.

A program processes one slot of `RowChunks`: tokens of one timestep, whose scale, shift and gate it
reads once. All arithmetic is in float32, and each result is rounded once.
"""

# ruff: noqa: C901, PLR0913, PLR0915  # a kernel takes its tensors, strides and sizes one by one
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

# T tokens, D model width, N timesteps (table rows), S slots, P tables with gradients

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece(slots, slot):
    """(table row, begin, end) of `slot`; begin and end are indices into the sorted tokens."""
    return tl.load(slots + 3 * slot), tl.load(slots + 3 * slot + 1), tl.load(slots + 3 * slot + 2)


@triton.jit
def gated_norm_forward(
    h,  # [T, D], contiguous, like all tensors with T
    y,  # [T, D], only if GATED
    gate,  # [N, D], only if GATED; rows are `gate_stride` apart
    scale,  # [N, D], only if NORM
    shift,  # [N, D], only if NORM
    order,  # `RowChunks.order_T`
    slots,  # `RowChunks.slots_S3`
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
    RMS: tl.constexpr,  # RMSNorm: the mean is not subtracted
):
    """Stores the gated residual and the modulated LayerNorm or RMSNorm of a slot's tokens."""
    slot = tl.program_id(0)
    row, begin, end = piece(slots, slot)
    column = tl.arange(0, BLOCK)
    used = column < tl.where(begin < end, D, 0)  # a slot without tokens reads and writes nothing
    if GATED:
        gate_D = tl.load(gate + row * gate_stride + column, used, 0.0).to(tl.float32)
    if NORM:
        scale_D = tl.load(scale + row * scale_stride + column, used, 0.0).to(tl.float32)
        shift_D = tl.load(shift + row * shift_stride + column, used, 0.0).to(tl.float32)
    # Two stages: the next tokens are loaded while some are computed.
    for first in tl.range(begin, end, TOKENS, num_stages=2):
        at = first + tl.arange(0, TOKENS)
        token = tl.load(order + at, at < end, 0).to(tl.int64)
        inside = (at < end)[:, None] & (column < D)[None, :]
        place = token[:, None] * D + column[None, :]
        h_TD = tl.load(h + place, inside, 0.0).to(tl.float32)
        if GATED:
            y_TD = tl.load(y + place, inside, 0.0).to(tl.float32)
            sum_TD = (h_TD + gate_D[None, :] * y_TD).to(sum_h.dtype.element_ty)
            tl.store(sum_h + place, sum_TD, inside)
            # The norm of the rounded sum, because the backward pass reads the rounded sum.
            h_TD = sum_TD.to(tl.float32)
        if NORM:
            mean_T = tl.zeros([TOKENS], tl.float32) if RMS else tl.sum(h_TD, 1) / D
            centred_TD = tl.where(inside, h_TD - mean_T[:, None], 0.0)
            pace_T = 1 / tl.sqrt(tl.sum(centred_TD * centred_TD, 1) / D + EPS)
            x_TD = centred_TD * pace_T[:, None] * scale_D[None, :] + shift_D[None, :]
            tl.store(x + place, x_TD.to(x.dtype.element_ty), inside)
            tl.store(stats + 2 * token, mean_T, at < end)
            tl.store(stats + 2 * token + 1, pace_T, at < end)


@triton.jit
def normalised_gradient(to_x, h, place, inside, mean_T, pace_T, scale_D):
    """(g, n, g · scale) of a tile of tokens, with g = dL/dx and n the normalised tokens."""
    g_TD = tl.load(to_x + place, inside, 0.0).to(tl.float32)
    h_TD = tl.load(h + place, inside, 0.0).to(tl.float32)
    return g_TD, (h_TD - mean_T[:, None]) * pace_T[:, None], g_TD * scale_D[None, :]


@triton.jit
def token_gradient(to_sum, to_h, place, inside, a_TD, n_TD, means, pace_T, RESIDUAL: tl.constexpr):
    """Computes, stores and returns dL/dh of a tile of tokens."""
    d_TD = (a_TD - means[0][:, None] - n_TD * means[1][:, None]) * pace_T[:, None]
    if RESIDUAL:
        d_TD += tl.load(to_sum + place, inside, 0.0).to(tl.float32)
    tl.store(to_h + place, d_TD.to(to_h.dtype.element_ty), inside)
    return d_TD


@triton.jit
def gated_gradient(y, to_y, place, inside, d_TD, gate_D):
    """Stores dL/dy of a tile of tokens, and returns the tile's sum for dL/dgate."""
    y_TD = tl.load(y + place, inside, 0.0).to(tl.float32)
    tl.store(to_y + place, (d_TD * gate_D[None, :]).to(to_y.dtype.element_ty), inside)
    return tl.sum(d_TD * y_TD, 0)


@triton.jit
def gated_norm_backward(
    to_x,  # gradient of x, only if NORM
    to_sum,  # gradient of the sum by the residual, only if RESIDUAL
    h,  # the tokens that were normalised, only if NORM
    y,  # only if GATED
    gate,
    scale,
    stats,
    order,
    slots,
    to_h,  # out [T, D], only if NORM; otherwise the gradient of h is `to_sum`
    to_y,  # out [T, D], only if GATED
    parts,  # out [S, P, D], float32: shift and scale if NORM, then gate if GATED
    gate_stride,
    scale_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,  # 2: the next tokens are loaded while some are computed
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RMS: tl.constexpr,
):
    """Stores the gradients of a slot's tokens, and the slot's partial gradients of the tables.

    Let n be the normalised tokens, r = 1 / standard deviation, g = dL/dx, and a = g · scale. Then
    dL/dh = r · (a - mean(a) - n · mean(a · n)) + dL/dsum; for RMSNorm without mean(a).

    The last columns of wide tokens are a separate tile, in variables whose names end in 2: widths
    of tiles are powers of two, and one tile of all columns would need too many registers.
    """
    slot = tl.program_id(0)
    row, begin, end = piece(slots, slot)
    column, width = tl.arange(0, BLOCK), tl.where(begin < end, D, 0)
    used = column < width  # a slot without tokens reads and writes nothing
    if TAIL:
        column2 = BLOCK + tl.arange(0, TAIL)
        used2 = column2 < width
    if GATED:
        gate_D = tl.load(gate + row * gate_stride + column, used, 0.0).to(tl.float32)
        to_gate_D = tl.zeros([BLOCK], tl.float32)
        if TAIL:
            gate2_D = tl.load(gate + row * gate_stride + column2, used2, 0.0).to(tl.float32)
            to_gate2_D = tl.zeros([TAIL], tl.float32)
    if NORM:
        scale_D = tl.load(scale + row * scale_stride + column, used, 0.0).to(tl.float32)
        to_scale_D, to_shift_D = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        if TAIL:
            scale2_D = tl.load(scale + row * scale_stride + column2, used2, 0.0).to(tl.float32)
            to_scale2_D, to_shift2_D = tl.zeros([TAIL], tl.float32), tl.zeros([TAIL], tl.float32)
    for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
        at = first + tl.arange(0, TOKENS)
        token = tl.load(order + at, at < end, 0).to(tl.int64)
        inside = (at < end)[:, None] & (column < D)[None, :]
        place = token[:, None] * D + column[None, :]
        if TAIL:
            inside2 = (at < end)[:, None] & (column2 < D)[None, :]
            place2 = token[:, None] * D + column2[None, :]
        if NORM:
            mean_T = tl.load(stats + 2 * token, at < end, 0.0)
            pace_T = tl.load(stats + 2 * token + 1, at < end, 0.0)
            g, n, a = normalised_gradient(to_x, h, place, inside, mean_T, pace_T, scale_D)
            to_shift_D += tl.sum(g, 0)
            to_scale_D += tl.sum(g * n, 0)
            sum_a_T, sum_an_T = tl.sum(a, 1), tl.sum(a * n, 1)
            if TAIL:
                g2, n2, a2 = normalised_gradient(to_x, h, place2, inside2, mean_T, pace_T, scale2_D)
                to_shift2_D += tl.sum(g2, 0)
                to_scale2_D += tl.sum(g2 * n2, 0)
                sum_a_T += tl.sum(a2, 1)
                sum_an_T += tl.sum(a2 * n2, 1)
            if RMS:
                sum_a_T = tl.zeros([TOKENS], tl.float32)
            means = sum_a_T / D, sum_an_T / D
            d = token_gradient(to_sum, to_h, place, inside, a, n, means, pace_T, RESIDUAL)
        else:
            d = tl.load(to_sum + place, inside, 0.0).to(tl.float32)
        if GATED:
            to_gate_D += gated_gradient(y, to_y, place, inside, d, gate_D)
        if TAIL:
            if NORM:
                d2 = token_gradient(to_sum, to_h, place2, inside2, a2, n2, means, pace_T, RESIDUAL)
            else:
                d2 = tl.load(to_sum + place2, inside2, 0.0).to(tl.float32)
            if GATED:
                to_gate2_D += gated_gradient(y, to_y, place2, inside2, d2, gate2_D)
    part = parts + slot * ((2 if NORM else 0) + (1 if GATED else 0)) * D
    if NORM:
        tl.store(part + column, to_shift_D, used)
        tl.store(part + D + column, to_scale_D, used)
        if TAIL:
            tl.store(part + column2, to_shift2_D, used2)
            tl.store(part + D + column2, to_scale2_D, used2)
        part += 2 * D
    if GATED:
        tl.store(part + column, to_gate_D, used)
        if TAIL:
            tl.store(part + column2, to_gate2_D, used2)


@triton.jit
def gated_norm_add_row_parts(
    parts,  # [S, P, D], float32
    rows,
    out,  # [P, N, D]
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Stores the gradient of a table row: the sum of its slots' partial sums, in their order.

    A row without tokens gets zeros.
    """
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
