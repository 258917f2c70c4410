"""Bytes that a fused operator loads from and stores to the memory of a GPU.

Only shapes matter, so tensors may be on the meta device. A test compares the results with the loads
and stores of Triton's interpreter. Data that every program reads are counted once for each program,
although most of these reads hit a cache.
"""

# T tokens, N timesteps, S slots, D model width, H heads, K head width, X numbers of a head in the
# matrix product

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dit.models.kernels import across_heads, restored_rows
from dit.models.kernels.gated_norm import PARTS_BLOCK
from dit.models.kernels.rotated_heads import grid_of

_NUMBER = 4  # bytes of a float32 or int32


def _gated_norm(*arguments: Any) -> int:
    h, _, gate, scale, _, _, slots, *_ = arguments
    gated, norm = gate is not None, scale is not None
    read = (gated + 2 * norm) * len(slots) * _row(gate, scale) + _places(h, slots)
    read += (1 + gated) * _bytes(h)
    return read + (gated + norm) * _bytes(h) + norm * _stats(h)


def _gated_norm_backward(*arguments: Any) -> int:
    to_x, to_sum, _, _, gate, scale, _, _, slots, rows, *_ = arguments
    tokens = to_x if to_sum is None else to_sum
    gated, norm, residual = gate is not None, scale is not None, to_sum is not None
    kinds, width = 2 * norm + gated, tokens.shape[-1]
    total = (gated + norm) * len(slots) * _row(gate, scale) + _places(tokens, slots)
    total += norm * _stats(tokens) + (3 * norm + residual + 2 * gated) * _bytes(tokens)
    parts = len(slots) * kinds * width * _NUMBER  # written, then read by the kernel that adds them
    bounds = kinds * -(-width // PARTS_BLOCK) * len(rows) * 2 * _NUMBER
    return total + 2 * parts + bounds + kinds * len(rows) * _row(gate, scale)


def _rotated_heads(*arguments: Any) -> int:
    x, weight, _, cos, _, _ = arguments
    return _angles_and_weights(x, weight, cos) + 4 * _heads(x, weight)


def _rotated_heads_backward(*arguments: Any) -> int:
    _, _, to_others, _, _, x, weight, _, cos, _, _ = arguments
    total = _angles_and_weights(x, weight, cos) + 6 * _heads(x, weight)
    total += 2 * sum(map(_bytes, to_others))
    programs, groups = grid_of(x.shape[0], x.shape[1], len(weight))
    return total + 2 * _added_parts(weight, programs * groups)


def _across_heads_sums(*arguments: Any) -> int:
    a, b = arguments
    return _bytes(a) + (0 if b is None else _bytes(b)) + len(a) * _NUMBER


def _across_heads(*arguments: Any) -> int:
    x, weight, _, cos, _, twisted, *_ = arguments
    programs, groups = across_heads.grid_of(*x.shape[:2])
    total = 2 * _bytes(x) + groups * len(x) * _NUMBER + programs * _bytes(weight)
    return total + _angles(cos, twisted, groups)


def _across_heads_backward(*arguments: Any) -> int:
    to_out, to_others, _, _, x, weights, _, _, cos, _, twisted, *_ = arguments
    programs, groups = across_heads.grid_of(*x.shape[:2])
    total = 3 * sum(map(_bytes, to_out)) + 2 * sum(map(_bytes, to_others))
    for weight in weights:
        total += 2 * groups * len(x) * _NUMBER + programs * _bytes(weight)
        total += _angles(cos, twisted, groups) + _added_parts(weight, programs)
    return total


def _adapter_dropout(*arguments: Any) -> int:
    x, place, *_ = arguments
    return 2 * _bytes(x) + _bytes(place)


def _adapter_dropout_add(*arguments: Any) -> int:
    total, *rest = arguments
    return _bytes(total) + _adapter_dropout(*rest)


def _restored_rows(*arguments: Any) -> int:
    narrow, exponents, dtype = arguments
    columns = -(-narrow.shape[1] // restored_rows.COLUMNS)
    return narrow.numel() * (1 + dtype.itemsize) + columns * _bytes(exponents)


OPERATOR_BYTES: Mapping[str, Callable[..., int]] = {
    "dit::gated_norm": _gated_norm,
    "dit::gated_norm_backward": _gated_norm_backward,
    "dit::rotated_heads": _rotated_heads,
    "dit::rotated_heads_backward": _rotated_heads_backward,
    "dit::across_heads_sums": _across_heads_sums,
    "dit::across_heads": _across_heads,
    "dit::across_heads_backward": _across_heads_backward,
    "dit::adapter_dropout": _adapter_dropout,
    "dit::adapter_dropout_add": _adapter_dropout_add,
    "dit::restored_rows": _restored_rows,
}
"""Maps an operator's name to a function that computes the bytes from the arguments of a call."""


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _row(*rows: Tensor | None) -> int:
    """Bytes of one row of a table [N, D], the first of `rows` that is not None."""
    row = next(one for one in rows if one is not None)
    return row.shape[-1] * row.element_size()


def _places(tokens: Tensor, slots: Tensor) -> int:
    """Bytes of `RowChunks`: three int32 numbers for each slot and one for each token.

    `tokens` are [T, D], `slots` [S, 3].
    """
    return (3 * len(slots) + len(tokens)) * _NUMBER


def _stats(tokens: Tensor) -> int:
    """Bytes of the statistics of `tokens` [T, D]: two float32 numbers for each token."""
    return 2 * len(tokens) * _NUMBER


def _angles(cos: Tensor | None, twisted: bool, groups: int) -> int:
    """Bytes of the cosines and sines that all groups of heads read; 0 if `cos` is None.

    If they are [T, K], each group reads all of them; if [T, H, K], only those of its heads. Without
    `twisted` only one half of the head width is read.
    """
    if cos is None:
        return 0
    return (1 + twisted) * (groups if cos.dim() == 2 else 1) * _bytes(cos)


def _added_parts(weight: Tensor, programs: int) -> int:
    """Bytes for a weight's gradient: programs write partial sums, and torch adds and rounds them.

    `weight` is [K] if it is the same for all heads, else [H * K].
    """
    sums = len(weight) * _NUMBER
    rounding = 0 if weight.element_size() == _NUMBER else sums + _bytes(weight)
    return (2 * programs + 1) * sums + rounding


def _angles_and_weights(x: Tensor, weight: Tensor, cos: Tensor) -> int:
    """Bytes of the angles that each group of heads reads, and of the weights that programs read.

    `x` is [T, H, X], `weight` [K] is that of queries or of keys, `cos` is [T, K].
    """
    programs, groups = grid_of(x.shape[0], x.shape[1], len(weight))
    return groups * (_bytes(cos) + programs * 2 * _bytes(weight))


def _heads(x: Tensor, weight: Tensor) -> int:
    """Bytes of the queries (or keys) of all tokens: K numbers in each head of `x` [T, H, X]."""
    return x.shape[0] * x.shape[1] * len(weight) * x.element_size()
