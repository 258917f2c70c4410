"""Attention by kernels that take a whole pack in one call and know no padding."""

# T query tokens, S key tokens, H heads, K head width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dit.models.attention.spans import Spans
from dit.pack_wire import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Offsets:
    """Sequences, end to end: each token is a query or a key of exactly one.

    Those at the end may be empty.
    """

    cu: Tensor  # int32, first query of each sequence, and the number of queries
    key_cu: Tensor
    longest: int
    longest_key: int


Kernel = Callable[[Tensor, Tensor, Tensor, Offsets], Tensor]


def attend_packed(
    q_THK: Tensor,
    k_SHK: Tensor,
    v_SHK: Tensor,
    spans: Spans,
    *,
    kernel: Kernel,
    count_multiple: int = 1,
) -> Tensor:
    """Attention of all samples by a `kernel` that knows no padding.

    Such kernels cannot leave tokens out, and to gather the others costs more than their attention
    to each other. So padding is made sequences of its own. That is exact: no real token has padding
    among its keys, and no gradient comes from the outputs of padding. Empty sequences make their
    number a multiple of `count_multiple`.
    """
    held: _Held = spans.once(  # type: ignore[assignment]
        f"held by {count_multiple}",
        lambda: _Held.of(spans, keys=len(k_SHK), count_multiple=count_multiple),
    )
    if held.keys != slice(0, len(k_SHK)):
        k_SHK, v_SHK = k_SHK[held.keys], v_SHK[held.keys]
    out_THK = kernel(q_THK, k_SHK, v_SHK, held.offsets)
    return out_THK if held.zeros_T11 is None else out_THK.masked_fill(held.zeros_T11, 0)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a kernel is told of a pack."""

    offsets: Offsets
    keys: slice  # no query asks those before, and for those behind none is left
    zeros_T11: Tensor | None  # True on real queries without keys; None where there are none

    @classmethod
    def of(cls, spans: Spans, *, keys: int, count_multiple: int) -> _Held:
        first = first_key(spans)
        lengths, key_lengths = zip(*sequences(spans, keys=keys), strict=True)
        ends = [
            filled_up((0, *accumulate(each)), count_multiple) for each in (lengths, key_lengths)
        ]
        cu, key_cu = to_device(torch.tensor(ends, dtype=torch.int32), spans.device)
        offsets = Offsets(cu=cu, key_cu=key_cu, longest=max(lengths), longest_key=max(key_lengths))
        zeros_T11 = None
        if spans.without_keys:
            zeros_T11 = torch.zeros(spans.total, 1, 1, dtype=torch.bool)
            for start, length in spans.without_keys:
                zeros_T11[start : start + length] = True
            zeros_T11 = to_device(zeros_T11, spans.device)
        return cls(offsets, slice(first, first + ends[1][-1]), zeros_T11)


def filled_up(offsets: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Offsets, of a multiple of that many sequences: those at the end are empty."""
    return offsets + offsets[-1:] * (-(len(offsets) - 1) % multiple)


def first_key(spans: Spans) -> int:
    """The first one that a sequence holds.

    A context rank has the text of samples that lie on the ranks before it, and no query for it.
    """
    return 0 if spans.starts[0] else spans.key_starts[0]


def sequences(spans: Spans, *, keys: int) -> list[tuple[int, int]]:
    """(queries, keys) of sequences that hold all queries, in order, and all `keys` but the last.

    They are the samples, and between them pieces of padding, none longer than the longest sample
    where that is possible. Queries without keys between them belong to the sample before. Keys at
    the end that outnumber the queries there are left out.
    """
    found: list[tuple[int, int]] = []
    longest = max(spans.lengths), max(spans.key_lengths)
    row, key_row = 0, first_key(spans)
    for start, length, key_start, key_length in zip(
        spans.starts, spans.lengths, spans.key_starts, spans.key_lengths, strict=True
    ):
        found += [*_padding(start - row, key_start - key_row, longest), (length, key_length)]
        row, key_row = start + length, key_start + key_length
    rest = spans.total - row
    found += _padding(rest, min(rest, keys - key_row), longest)
    joined = found[:1]
    for queries, its_keys in found[1:]:
        if its_keys and joined[-1][1]:
            joined.append((queries, its_keys))
        else:  # also of queries before the first key
            joined[-1] = (joined[-1][0] + queries, joined[-1][1] + its_keys)
    return joined


def _padding(queries: int, keys: int, longest: tuple[int, int]) -> list[tuple[int, int]]:
    """Sequences of the padding between two samples."""
    assert queries or not keys, "keys that no query asks belong behind all others"
    if not queries:
        return []
    wanted = max(-(-queries // longest[0]), -(-keys // longest[1]))
    pieces = max(min(wanted, queries, keys), 1)
    shares = [[n // pieces + (i < n % pieces) for i in range(pieces)] for n in (queries, keys)]
    return list(zip(*shares, strict=True))
