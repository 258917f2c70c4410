"""Triton kernels of `across_heads`.

A rotary pair has one number in each half of a head, so the halves are two tiles, [heads, half of
the width]. All arithmetic is in float32, and each result is rounded once.
"""

# ruff: noqa: PLR0913  # a kernel takes its tensors, strides and sizes one by one
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from dit.models.kernels.rotated_heads_triton import load_halves, store_halves


@triton.jit
def across_heads_sums(
    a,  # [T, H, K], numbers of a head are contiguous
    b,  # [T, H, K] with other strides, or None: squares of a
    sums,  # out [T], float32
    a_token_stride,
    a_head_stride,
    b_token_stride,
    b_head_stride,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the sum of a * b over all numbers of a token; one program for each token."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    total = tl.zeros([HEADS, BLOCK], tl.float32)
    for first in tl.static_range(0, H, HEADS):  # type: ignore[misc]
        inside = (first + head < H)[:, None] & (column < WIDTH)[None, :]
        at = token * a_token_stride + (first + head)[:, None] * a_head_stride + column[None, :]
        one = tl.load(a + at, inside, 0.0).to(tl.float32)
        other = one
        if b is not None:
            at = token * b_token_stride + (first + head)[:, None] * b_head_stride + column[None, :]
            other = tl.load(b + at, inside, 0.0).to(tl.float32)
        total += one * other
    tl.store(sums + token, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def rotated(
    low,
    high,
    cos,
    sin,
    token,
    head,
    column,
    H: tl.constexpr,
    HALF: tl.constexpr,
    OF_HEADS: tl.constexpr,  # angles differ between heads
    TWISTED: tl.constexpr,  # angles differ between the halves of a head
    BACK: tl.constexpr,  # rotate by the transposed matrix
):
    """Both halves of the heads of a token, rotated; unchanged if `cos` is None."""
    if cos is not None:
        if OF_HEADS:
            at = (token * H + head[:, None]) * (2 * HALF) + column[None, :]
            inside = (head < H)[:, None] & (column < HALF)[None, :]
        else:
            at = token * (2 * HALF) + column[None, :]
            inside = (column < HALF)[None, :]
        cos_low, sin_low = tl.load(cos + at, inside, 0.0), tl.load(sin + at, inside, 0.0)
        cos_high, sin_high = cos_low, sin_low
        if TWISTED:
            cos_high = tl.load(cos + at + HALF, inside, 0.0)
            sin_high = tl.load(sin + at + HALF, inside, 0.0)
        if BACK:
            turned_low = low * cos_low + high * sin_high
            turned_high = high * cos_high - low * sin_low
        else:
            turned_low = low * cos_low - high * sin_low
            turned_high = high * cos_high + low * sin_high
        low, high = turned_low, turned_high
    return low, high


@triton.jit(do_not_specialize=["tokens"])  # or packs of other lengths would compile anew
def across_heads_forward(
    x,  # [T, H, K], numbers of a head are contiguous
    weight,  # [H, K]
    squares,  # [T], float32, over the heads of all tensor ranks
    cos,  # [T, K] or [T, H, K], float32, contiguous; None: no rotation
    sin,
    out,  # out [T, H, K], contiguous
    tokens,
    token_stride,
    head_stride,
    EPS: tl.constexpr,
    NUMBERS: tl.constexpr,  # of a token on all tensor ranks
    OF_HEADS: tl.constexpr,
    TWISTED: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores normalised and rotated queries or keys.

    A program processes a group of heads of every n-th token, for n programs.
    """
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < H)[:, None] & (column < HALF)[None, :]
    place = head[:, None] * (2 * HALF) + column[None, :]
    x_place = head[:, None] * head_stride + column[None, :]
    weight_low, weight_high = load_halves(weight, place, inside, HALF)
    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        pace = 1 / tl.sqrt(tl.load(squares + token) / NUMBERS + EPS)
        low, high = load_halves(x + token * token_stride, x_place, inside, HALF)
        low, high = low * pace * weight_low, high * pace * weight_high
        low, high = rotated(
            low, high, cos, sin, token, head, column, H, HALF, OF_HEADS, TWISTED, False
        )
        store_halves(out + token * (H * 2 * HALF), place, inside, low, high, HALF)
        token += tl.num_programs(0)


@triton.jit(do_not_specialize=["tokens"])  # or packs of other lengths would compile anew
def across_heads_backward(
    to_out,  # [T, H, K], numbers of a head are contiguous
    x,
    weight,  # [H, K]
    squares,  # [T], float32
    products,  # [T], float32: sums of to_out times out over the heads of all tensor ranks
    cos,
    sin,
    to_x,  # out, with the strides of x
    parts,  # out [programs, H, K], float32: partial gradients of the weight
    tokens,
    to_out_token_stride,
    to_out_head_stride,
    token_stride,
    head_stride,
    EPS: tl.constexpr,
    NUMBERS: tl.constexpr,
    OF_HEADS: tl.constexpr,
    TWISTED: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the gradient of x, and this program's partial gradient of the weight.

    Let n be the normalised numbers, r = 1 / (root mean square of x), g the gradient of the output
    rotated back, and a = g · weight. Then dL/dx = r · (a - n · mean(a · n)), and dL/dweight is the
    sum of g · n. Rotations preserve products, so mean(a · n) is `products` / NUMBERS.
    """
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < H)[:, None] & (column < HALF)[None, :]
    place = head[:, None] * (2 * HALF) + column[None, :]
    x_place = head[:, None] * head_stride + column[None, :]
    g_place = head[:, None] * to_out_head_stride + column[None, :]
    weight_low, weight_high = load_halves(weight, place, inside, HALF)
    sum_low, sum_high = tl.zeros([HEADS, BLOCK], tl.float32), tl.zeros([HEADS, BLOCK], tl.float32)
    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        pace = 1 / tl.sqrt(tl.load(squares + token) / NUMBERS + EPS)
        mean = tl.load(products + token) / NUMBERS
        low, high = load_halves(to_out + token * to_out_token_stride, g_place, inside, HALF)
        g_low, g_high = rotated(
            low, high, cos, sin, token, head, column, H, HALF, OF_HEADS, TWISTED, True
        )
        low, high = load_halves(x + token * token_stride, x_place, inside, HALF)
        low, high = low * pace, high * pace
        sum_low += g_low * low
        sum_high += g_high * high
        low = (g_low * weight_low - low * mean) * pace
        high = (g_high * weight_high - high * mean) * pace
        store_halves(to_x + token * token_stride, x_place, inside, low, high, HALF)
        token += tl.num_programs(0)
    part = parts + tl.program_id(0) * (H * 2 * HALF)
    store_halves(part, place, inside, sum_low, sum_high, HALF)
