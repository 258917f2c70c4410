"""Bytes that the loads and stores of a fused operator move between the chip and its memory.

From shapes alone, so that it serves tensors without values; a test holds it against the loads and
stores that Triton's interpreter makes. What a program reads once and keeps is counted once for each
program, though most of it comes from a cache.
"""

# T tokens, N level rows, S slots, D model width, H heads, K head width

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dit.models.kernels.gated_norm import PARTS_BLOCK
from dit.models.kernels.rotated_heads import grid_of

_NUMBER = 4  # bytes of a float32 or int32


def _gated_norm(*arguments: Any) -> int:
    h, _, gate, scale, _, _, slots = arguments
    gated, norm = gate is not None, scale is not None
    read = (gated + 2 * norm) * len(slots) * _row(gate, scale) + _places(h, slots)
    read += (1 + gated) * _bytes(h)
    return read + (gated + norm) * _bytes(h) + norm * _stats(h)


def _gated_norm_backward(*arguments: Any) -> int:
    to_x, to_sum, _, _, gate, scale, _, _, slots, rows = arguments
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
    _, _, to_others, x, weight, _, cos, _, _ = arguments
    total = _angles_and_weights(x, weight, cos) + 6 * _heads(x, weight)
    total += 2 * sum(map(_bytes, to_others))
    programs, groups = grid_of(*x.shape[:2])
    sums = 2 * len(weight) * _NUMBER
    # Parts of the sums are written by the kernel; torch reads them, writes the sums and rounds.
    rounding = 0 if weight.element_size() == _NUMBER else sums + 2 * _bytes(weight)
    return total + 2 * programs * groups * sums + sums + rounding


def _adapter_dropout(*arguments: Any) -> int:
    x, place, *_ = arguments
    return 2 * _bytes(x) + _bytes(place)


def _adapter_dropout_add(*arguments: Any) -> int:
    total, *rest = arguments
    return _bytes(total) + _adapter_dropout(*rest)


OPERATOR_BYTES: Mapping[str, Callable[..., int]] = {
    "dit::gated_norm": _gated_norm,
    "dit::gated_norm_backward": _gated_norm_backward,
    "dit::rotated_heads": _rotated_heads,
    "dit::rotated_heads_backward": _rotated_heads_backward,
    "dit::adapter_dropout": _adapter_dropout,
    "dit::adapter_dropout_add": _adapter_dropout_add,
}
"""By the operator's name; each takes the arguments of a call."""


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _row(*rows: Tensor | None) -> int:
    """A level row of one kind."""
    row = next(one for one in rows if one is not None)
    return row.shape[-1] * row.element_size()


def _places(tokens: Tensor, slots: Tensor) -> int:
    """Where the tokens of each program lie."""
    return (3 * len(slots) + len(tokens)) * _NUMBER


def _stats(tokens: Tensor) -> int:
    return 2 * len(tokens) * _NUMBER


def _angles_and_weights(x: Tensor, weight: Tensor, cos: Tensor) -> int:
    """Half of the cosines and sines for each group of heads, and the weights for each program."""
    programs, groups = grid_of(*x.shape[:2])
    return groups * (_bytes(cos) + programs * 2 * _bytes(weight))


def _heads(x: Tensor, weight: Tensor) -> int:
    """Queries, or keys, of all tokens."""
    return x.shape[0] * x.shape[1] * len(weight) * x.element_size()
