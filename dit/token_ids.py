"""Token ids as pairs of floats that bfloat16 holds exactly: two digits of base 256."""

# L tokens

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_IDS = "token_ids"
"""Name, in a shard, of the token ids that the network's text conditioner reads (Anima)."""
DIGITS = 2
MOST_TOKENS = 256**DIGITS


def as_digits(ids_L: Tensor) -> Tensor:
    """The digits (high, low), float32 [L, 2], of token ids `ids_L`, each below `MOST_TOKENS`."""
    from torch import stack  # descriptions of families, which import this file, do without torch

    return stack((ids_L // 256, ids_L % 256), dim=-1).float()


def as_ids(digits_L2: Tensor) -> Tensor:
    """The token ids, int64 [L], with the digits `digits_L2`; undoes `as_digits`."""
    high_L, low_L = digits_L2.long().unbind(-1)
    return high_L * 256 + low_L


def are_ids(digits_L2: Tensor, *, vocabulary: int) -> bool:
    """Whether all rows of `digits_L2` are digits of token ids below `vocabulary`."""
    ids_L = as_ids(digits_L2)
    whole = bool((as_digits(ids_L) == digits_L2.float()).all())
    return whole and bool(((ids_L >= 0) & (ids_L < vocabulary)).all())
