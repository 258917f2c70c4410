"""Attention inside each sample of a pack.

One signature, `attend(q_THK, k_SHK, v_SHK, spans) -> [T, H, K]`: token i of a sample attends to all
real keys of the same sample and to nothing else; padding gets zeros. `tests` hold each
implementation against `attend_one_by_one`.
"""

# T query tokens, S key tokens, H heads, K head width; G samples of one shape

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Where the real tokens of each sample lie among queries and among keys."""

    starts: tuple[int, ...]  # first query of each sample
    lengths: tuple[int, ...]  # real queries of each sample
    key_starts: tuple[int, ...]
    key_lengths: tuple[int, ...]
    total: int  # rows of the query tensor, padding included
    device: torch.device
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
        """From (first row, number of rows) per sample; samples without queries are left out."""
        both = [(*q, *k) for q, k in zip(queries, keys, strict=True) if q[1] > 0]
        starts, lengths, key_starts, key_lengths = zip(*both, strict=True) if both else ((),) * 4
        return cls(
            starts=starts,
            lengths=lengths,
            key_starts=key_starts,
            key_lengths=key_lengths,
            total=total,
            device=device,
        )

    def once(self, name: str, make: Callable[[], object]) -> object:
        """The value of `make()`, made once for all layers."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


Attend = Callable[[Tensor, Tensor, Tensor, Spans], Tensor]


def attend_one_by_one(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """The plain definition: a softmax per sample, in a loop."""
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


def attend_by_shape(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """SDPA, one batched call for all samples of equal lengths: the fastest way on a CPU."""
    plan: _ByShape = spans.once("by_shape", lambda: _ByShape.of(spans))  # type: ignore[assignment]
    outs = []
    for query_GT, key_GS in zip(plan.queries, plan.keys, strict=True):
        q, k, v = (
            x[index].transpose(1, 2)
            for x, index in ((q_THK, query_GT), (k_SHK, key_GS), (v_SHK, key_GS))
        )
        outs.append(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    outs.append(q_THK.new_zeros(1, *q_THK.shape[1:]))  # what padding reads
    return torch.cat(outs)[plan.row_T]


@dataclass(frozen=True, slots=True)
class _ByShape:
    queries: list[Tensor]  # per shape, [G, T] rows of the query tensor
    keys: list[Tensor]  # per shape, [G, S] rows of the key tensor
    row_T: Tensor  # where each query's result lies in the results laid end to end

    @classmethod
    def of(cls, spans: Spans) -> _ByShape:
        shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for start, length, key_start, key_length in zip(
            spans.starts, spans.lengths, spans.key_starts, spans.key_lengths, strict=True
        ):
            shapes.setdefault((length, key_length), []).append((start, key_start))
        queries, keys = [], []
        for (length, key_length), places in shapes.items():
            first = torch.tensor(places)
            queries.append(first[:, :1] + torch.arange(length))
            keys.append(first[:, 1:] + torch.arange(key_length))
        rows = torch.cat([q.flatten() for q in queries])
        row_T = torch.full((spans.total,), len(rows))
        row_T[rows] = torch.arange(len(rows))
        to = spans.device
        return cls([q.to(to) for q in queries], [k.to(to) for k in keys], row_T.to(to))


def attend_varlen(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """Flash attention of torch: one kernel for the whole pack (CUDA only)."""
    from torch.nn.attention.varlen import varlen_attn

    plan: _Varlen = spans.once("varlen", lambda: _Varlen.of(spans, keys=len(k_SHK)))  # type: ignore[assignment]
    # The kernel cannot mask keys in its backward pass, so padding leaves before and comes back.
    q, k, v = (
        x if rows is None else x[rows]
        for x, rows in ((q_THK, plan.rows), (k_SHK, plan.key_rows), (v_SHK, plan.key_rows))
    )
    out = varlen_attn(q, k, v, plan.cu, plan.key_cu, max(spans.lengths), max(spans.key_lengths))
    assert isinstance(out, Tensor)
    return out if plan.rows is None else torch.zeros_like(q_THK).index_copy(0, plan.rows, out)


@dataclass(frozen=True, slots=True)
class _Varlen:
    cu: Tensor  # int32 [N + 1], offsets of the samples without padding
    key_cu: Tensor
    rows: Tensor | None  # real rows, or none where every row is real
    key_rows: Tensor | None

    @classmethod
    def of(cls, spans: Spans, *, keys: int) -> _Varlen:
        def offsets(lengths: tuple[int, ...]) -> Tensor:
            made = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)
            return made.to(spans.device, non_blocking=True)

        def real(starts: tuple[int, ...], lengths: tuple[int, ...], total: int) -> Tensor | None:
            if sum(lengths) == total:
                return None
            rows = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
            return torch.cat(rows).to(spans.device, non_blocking=True)

        return cls(
            offsets(spans.lengths),
            offsets(spans.key_lengths),
            real(spans.starts, spans.lengths, spans.total),
            real(spans.key_starts, spans.key_lengths, keys),
        )


def attention_for(device: torch.device, dtype: torch.dtype) -> Attend:
    """The fastest implementation that this device and type have."""
    flash = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return attend_varlen if flash else attend_by_shape
