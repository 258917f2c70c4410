"""Triton kernels of `rotated_heads`.

A program processes a group of heads of every n-th token, for n programs, and reads cosines and
sines of a token once for the group. A rotary pair has one number in each half of a head, so the
halves are two tiles, [heads, half of the width]. All arithmetic is in float32, and each result is
rounded once.
"""

# ruff: noqa: PLR0913  # a kernel takes its tensors, strides and sizes one by one
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false

# H heads of a program

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_halves(tensor, place, inside, HALF: tl.constexpr):
    low = tl.load(tensor + place, inside, 0.0).to(tl.float32)
    return low, tl.load(tensor + place + HALF, inside, 0.0).to(tl.float32)


@triton.jit
def store_halves(tensor, place, inside, low, high, HALF: tl.constexpr):
    tl.store(tensor + place, low.to(tensor.dtype.element_ty), inside)
    tl.store(tensor + place + HALF, high.to(tensor.dtype.element_ty), inside)


@triton.jit
def normalised(low, high, HALF: tl.constexpr, EPS: tl.constexpr):
    """(low, high, r): both halves of each head times r = 1 / the head's root mean square."""
    squares_H = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    pace_H = 1 / tl.sqrt(squares_H / (2 * HALF) + EPS)
    return low * pace_H[:, None], high * pace_H[:, None], pace_H


@triton.jit
def turned(
    x, x_place, out, out_place, inside, weights, angles, HALF: tl.constexpr, EPS: tl.constexpr
):
    """Normalises and rotates the queries, or the keys, of one token and stores them in `out`."""
    low, high = load_halves(x, x_place, inside, HALF)
    low, high, _ = normalised(low, high, HALF, EPS)
    low *= weights[0][None, :]
    high *= weights[1][None, :]
    cos, sin = angles[0][None, :], angles[1][None, :]
    store_halves(out, out_place, inside, low * cos - high * sin, high * cos + low * sin, HALF)


@triton.jit
def turned_back(
    to_out,
    out_place,
    x,
    to_x,
    x_place,
    inside,
    weights,
    angles,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
):
    """Stores the gradient of one token's queries, or keys, in `to_x`.

    Returns both halves of g · n, whose sum over tokens and heads is the weight's gradient. Let n be
    the normalised numbers, r = 1 / root mean square, g the gradient rotated back, and a = g ·
    weight. Then dL/dx = r · (a - n · mean(a · n)).
    """
    g_low, g_high = load_halves(to_out, out_place, inside, HALF)
    cos, sin = angles[0][None, :], angles[1][None, :]
    to_low, to_high = g_low * cos + g_high * sin, g_high * cos - g_low * sin
    low, high = load_halves(x, x_place, inside, HALF)
    low, high, pace_H = normalised(low, high, HALF, EPS)
    a_low, a_high = to_low * weights[0][None, :], to_high * weights[1][None, :]
    mean_H = (tl.sum(a_low * low, 1) + tl.sum(a_high * high, 1)) / (2 * HALF)
    x_low = (a_low - low * mean_H[:, None]) * pace_H[:, None]
    x_high = (a_high - high * mean_H[:, None]) * pace_H[:, None]
    store_halves(to_x, x_place, inside, x_low, x_high, HALF)
    return to_low * low, to_high * high


@triton.jit(do_not_specialize=["tokens"])  # or packs of other lengths would compile anew
def rotated_heads_forward(
    x,  # [T, H, X], contiguous: in each head queries, keys, then other numbers
    weight_q,  # [K]
    weight_k,
    cos,  # [T, K], float32; both halves are equal
    sin,
    q,  # out [T, H, K]
    k,
    tokens,
    angle_stride,
    EPS: tl.constexpr,
    H: tl.constexpr,
    X: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < H)[:, None] & (column < HALF)[None, :]
    weights_q = load_halves(weight_q, column, column < HALF, HALF)
    weights_k = load_halves(weight_k, column, column < HALF, HALF)
    x_place = head[:, None] * X + column[None, :]
    out_place = head[:, None] * (2 * HALF) + column[None, :]
    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        at = token * angle_stride + column
        angles = tl.load(cos + at, column < HALF, 0.0), tl.load(sin + at, column < HALF, 0.0)
        x_at, out_at = x + token * (H * X), token * (H * 2 * HALF)
        turned(x_at, x_place, q + out_at, out_place, inside, weights_q, angles, HALF, EPS)
        keys = x_place + 2 * HALF
        turned(x_at, keys, k + out_at, out_place, inside, weights_k, angles, HALF, EPS)
        token += tl.num_programs(0)


# Otherwise packs of other lengths would be compiled again.
@triton.jit(
    do_not_specialize=[
        *("tokens", "q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride"),
    ]
)
def rotated_heads_backward(
    to_q,  # [T, H, K], numbers of a head are contiguous
    to_k,
    x,
    weight_q,
    weight_k,
    cos,
    sin,
    to_x,  # out [T, H, X], contiguous: only the numbers of queries and keys
    parts,  # out [programs, groups of heads, 2, K], float32: partial gradients of both weights
    tokens,
    angle_stride,
    q_token_stride,  # divided by DIVISOR, like the next three
    q_head_stride,
    k_token_stride,
    k_head_stride,
    DIVISOR: tl.constexpr,  # tells the compiler how many numbers can be read at once
    EPS: tl.constexpr,
    H: tl.constexpr,
    X: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < H)[:, None] & (column < HALF)[None, :]
    weights_q = load_halves(weight_q, column, column < HALF, HALF)
    weights_k = load_halves(weight_k, column, column < HALF, HALF)
    x_place = head[:, None] * X + column[None, :]
    q_place = head[:, None] * (q_head_stride * DIVISOR) + column[None, :]
    k_place = head[:, None] * (k_head_stride * DIVISOR) + column[None, :]
    sum_q_low, sum_q_high = (
        tl.zeros([HEADS, BLOCK], tl.float32),
        tl.zeros([HEADS, BLOCK], tl.float32),
    )
    sum_k_low, sum_k_high = (
        tl.zeros([HEADS, BLOCK], tl.float32),
        tl.zeros([HEADS, BLOCK], tl.float32),
    )
    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        at = token * angle_stride + column
        angles = tl.load(cos + at, column < HALF, 0.0), tl.load(sin + at, column < HALF, 0.0)
        x_at, to_x_at = x + token * (H * X), to_x + token * (H * X)
        to_out = to_q + token * q_token_stride * DIVISOR
        low, high = turned_back(
            to_out, q_place, x_at, to_x_at, x_place, inside, weights_q, angles, HALF, EPS
        )
        sum_q_low += low
        sum_q_high += high
        to_out, keys = to_k + token * k_token_stride * DIVISOR, x_place + 2 * HALF
        low, high = turned_back(
            to_out, k_place, x_at, to_x_at, keys, inside, weights_k, angles, HALF, EPS
        )
        sum_k_low += low
        sum_k_high += high
        token += tl.num_programs(0)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    part = parts + program * (4 * HALF) + column
    tl.store(part, tl.sum(sum_q_low, 0), column < HALF)
    tl.store(part + HALF, tl.sum(sum_q_high, 0), column < HALF)
    tl.store(part + 2 * HALF, tl.sum(sum_k_low, 0), column < HALF)
    tl.store(part + 3 * HALF, tl.sum(sum_k_high, 0), column < HALF)
