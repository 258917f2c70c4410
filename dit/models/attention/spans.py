"""Spans of a pack: which rows of queries and keys belong to each sample.

All kernels are called as `attend(q_THK, k_SHK, v_SHK, spans) -> [T, H, K]`: a token attends to all
real keys of its sample and to nothing else. Outputs of padding are finite, but undefined. Tests
compare each implementation with `attend_one_by_one`.
"""

# T query tokens, S key tokens, H heads, K head width

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from dit.models.attention.cubes import Cubes


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The rows of each sample's real tokens among the queries and among the keys of a pack."""

    starts: tuple[int, ...]  # row of the first query of each sample
    lengths: tuple[int, ...]  # number of real queries of each sample
    key_starts: tuple[int, ...]  # row of the first key of each sample
    key_lengths: tuple[int, ...]  # number of real keys of each sample
    total: int  # rows of the query tensor, padding included
    device: torch.device
    without_keys: tuple[tuple[int, int], ...] = ()
    """(first row, number of rows) of real queries whose samples have no keys: outputs are zeros."""
    cubes: Cubes | None = None
    """Cubes of video sparse attention; None for dense attention."""
    block_causal: BlockCausal | None = None
    """Calls of block-causal attention; None if each query attends to all keys of its sample."""
    _made: dict[str, object] = field(default_factory=dict)  # index tensors, made at first use

    @classmethod
    def of(
        cls,
        queries: Sequence[tuple[int, int]],
        keys: Sequence[tuple[int, int]],
        *,
        total: int,
        device: torch.device,
    ) -> Spans:
        """Spans of samples; `queries` and `keys` have (first row, number of rows) of each sample.

        Both sequences must be sorted by row. A sample without queries is left out. A sample with
        queries but without keys is listed in `without_keys` instead.
        """
        pairs = list(zip(queries, keys, strict=True))
        both = [(*q, *k) for q, k in pairs if q[1] > 0 and k[1] > 0]
        starts, lengths, key_starts, key_lengths = zip(*both, strict=True) if both else ((),) * 4
        return cls(
            starts=starts,
            lengths=lengths,
            key_starts=key_starts,
            key_lengths=key_lengths,
            total=total,
            device=device,
            without_keys=tuple(q for q, k in pairs if q[1] > 0 and k[1] == 0),
        )

    def once(self, name: str, make: Callable[[], object]) -> object:
        """The value of `make()`, computed for the first layer and kept for later ones by `name`."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


@dataclass(frozen=True, slots=True)
class MaskedCall:
    """A call of attention with a mask, for some queries of a sample."""

    rows: Tensor  # int64, rows of the queries
    keys: Tensor  # int64, rows of all keys that at least one of these queries attends to
    sees: Tensor  # bool [queries, keys], whether a query attends to a key


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCausal:
    """The calls of block-causal attention (see `block_causal.py`)."""

    rows: Tensor  # int64, rows of the queries of pictures
    keys: Tensor | None  # int64, rows of the keys of pictures; None: all keys of the pack, in order
    pictures: Spans  # of the gathered queries and keys of pictures
    texts: tuple[MaskedCall, ...]
    back: Tensor  # int64, index of each row in the outputs of all calls, followed by a row of zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class Offsets:
    """Offsets of concatenated sequences; each query and each key belongs to one sequence.

    Sequences at the end may be empty.
    """

    cu: Tensor  # int32 [sequences + 1], first query of each sequence, then the number of queries
    key_cu: Tensor  # int32 [sequences + 1], the same for keys
    longest: int  # queries of the longest sequence
    longest_key: int  # keys of the longest sequence
    _made: dict[object, Tensor] = field(default_factory=dict)  # for all layers, at first use

    def once(self, name: object, make: Callable[[], Tensor]) -> Tensor:
        """The value of `make()`, computed for the first layer and kept for later ones by `name`."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


Attend = Callable[[Tensor, Tensor, Tensor, Spans], Tensor]


def attend_in_groups(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, size: int) -> Tensor:
    """The output [T, H, K] of attention within each group of `size` adjacent rows."""
    q, k, v = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in (q_THK, k_THK, v_THK))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def attend_one_by_one(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """The output [T, H, K] of attention by its definition: a loop over samples, in float32."""
    out_THK = torch.zeros_like(q_THK)
    for start, length, key_start, key_length in zip(
        spans.starts, spans.lengths, spans.key_starts, spans.key_lengths, strict=True
    ):
        mine, keys = slice(start, start + length), slice(key_start, key_start + key_length)
        score_HTS = torch.einsum("thk,shk->hts", q_THK[mine].float(), k_SHK[keys].float())
        weight_HTS = (score_HTS * q_THK.shape[-1] ** -0.5).softmax(-1)
        value = torch.einsum("hts,shk->thk", weight_HTS, v_SHK[keys].float())
        out_THK[mine] = value.type_as(q_THK)
    return out_THK
