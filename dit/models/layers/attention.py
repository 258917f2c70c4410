"""Attention inside each sample of a pack.

One signature, `attend(q_THK, k_SHK, v_SHK, spans) -> [T, H, K]`: token i of a sample attends to all
real keys of the same sample and to nothing else. Padding gets finite numbers, which mean nothing.
`tests` hold each implementation against `attend_one_by_one`.
"""

# T query tokens, S key tokens, H heads, K head width; G samples of one shape

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import accumulate

import torch
import torch.nn.attention as nn_attention
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dit.pack_wire import to_device

_FLASH_3 = "flash_attn_interface"
"""Module of FlashAttention 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Where the real tokens of each sample lie among queries and among keys."""

    starts: tuple[int, ...]  # first query of each sample
    lengths: tuple[int, ...]  # real queries of each sample
    key_starts: tuple[int, ...]
    key_lengths: tuple[int, ...]
    total: int  # rows of the query tensor, padding included
    device: torch.device
    without_keys: tuple[tuple[int, int], ...] = ()
    """(first, number) of real queries that have nothing to attend to: their outputs are zeros."""
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
        """From (first row, number of rows) per sample.

        Both ascend. Samples without queries or without keys are left out.
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


def attend_by_runs(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """SDPA, one batched call for neighbours of equal lengths: the fastest way on a CPU.

    The loader lays samples of equal lengths side by side, so nothing has to be gathered.
    """
    runs: list[_Run] = spans.once("runs", lambda: list(_runs(spans, len(k_SHK))))  # type: ignore[assignment]
    pieces, row = [], 0
    for run in runs:
        q = run.queries.of(q_THK)
        k, v = run.keys.of(k_SHK), run.keys.of(v_SHK)
        out = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        padded = pad(out, (0, 0, 0, 0, 0, run.queries.step - run.queries.length))
        if run.queries.first > row:
            pieces.append(q_THK.new_zeros(run.queries.first - row, *q_THK.shape[1:]))
        pieces.append(padded.flatten(0, 1))
        row = run.queries.stop
    if row < spans.total:
        pieces.append(q_THK.new_zeros(spans.total - row, *q_THK.shape[1:]))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


@dataclass(frozen=True, slots=True)
class _Even:
    """Rows of samples of equal lengths, at equal distances."""

    first: int
    count: int
    step: int
    length: int

    @property
    def stop(self) -> int:
        return self.first + self.count * self.step

    def of(self, x_THK: Tensor) -> Tensor:
        """View [count, H, length, K]."""
        rows = x_THK[self.first : self.stop].unflatten(0, (self.count, self.step))
        return rows[:, : self.length].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours of equal lengths."""

    queries: _Even
    keys: _Even


def _runs(spans: Spans, keys: int) -> Iterator[_Run]:
    """Every sample in one run; the last of a run may lie too near the end for a full step."""
    samples = list(
        zip(spans.starts, spans.lengths, spans.key_starts, spans.key_lengths, strict=True)
    )
    while samples:
        first, length, key_first, key_length = samples[0]
        step, key_step = length, key_length
        if len(samples) > 1:
            step, key_step = samples[1][0] - first, samples[1][2] - key_first
        count = 1
        while count < len(samples) and samples[count] == (
            *(first + count * step, length),
            *(key_first + count * key_step, key_length),
        ):
            count += 1
        if first + count * step > spans.total or key_first + count * key_step > keys:
            count -= 1
        if count < 2:
            count, step, key_step = 1, length, key_length
        yield _Run(_Even(first, count, step, length), _Even(key_first, count, key_step, key_length))
        del samples[:count]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offsets:
    """Sequences, end to end: each token is a query or a key of exactly one."""

    cu: Tensor  # int32, first query of each sequence, and the number of queries
    key_cu: Tensor
    longest: int
    longest_key: int


Kernel = Callable[[Tensor, Tensor, Tensor, Offsets], Tensor]


def flash_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Flash attention of torch: one kernel for the whole pack (CUDA only)."""
    from torch.nn.attention.varlen import varlen_attn

    o = offsets
    out = varlen_attn(q_THK, k_SHK, v_SHK, o.cu, o.key_cu, o.longest, o.longest_key)
    assert isinstance(out, Tensor)
    return out


def attend_packed(
    q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans, *, kernel: Kernel = flash_kernel
) -> Tensor:
    """Attention of all samples by a `kernel` that knows no padding.

    Such kernels cannot leave tokens out, and to gather the others costs more than their attention
    to each other. So padding is made sequences of its own. That is exact: no real token has padding
    among its keys, and no gradient comes from the outputs of padding.
    """
    held: _Held = spans.once("held", lambda: _Held.of(spans, keys=len(k_SHK)))  # type: ignore[assignment]
    if held.keys < len(k_SHK):
        k_SHK, v_SHK = k_SHK[: held.keys], v_SHK[: held.keys]
    out_THK = kernel(q_THK, k_SHK, v_SHK, held.offsets)
    return out_THK if held.zeros_T11 is None else out_THK.masked_fill(held.zeros_T11, 0)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a kernel is told of a pack."""

    offsets: Offsets
    keys: int  # those behind are padding that no query is left for
    zeros_T11: Tensor | None  # True on real queries without keys; None where there are none

    @classmethod
    def of(cls, spans: Spans, *, keys: int) -> _Held:
        lengths, key_lengths = zip(*sequences(spans, keys=keys), strict=True)
        ends = [(0, *accumulate(each)) for each in (lengths, key_lengths)]
        cu, key_cu = to_device(torch.tensor(ends, dtype=torch.int32), spans.device)
        offsets = Offsets(cu=cu, key_cu=key_cu, longest=max(lengths), longest_key=max(key_lengths))
        zeros_T11 = None
        if spans.without_keys:
            zeros_T11 = torch.zeros(spans.total, 1, 1, dtype=torch.bool)
            for start, length in spans.without_keys:
                zeros_T11[start : start + length] = True
            zeros_T11 = to_device(zeros_T11, spans.device)
        return cls(offsets, ends[1][-1], zeros_T11)


def sequences(spans: Spans, *, keys: int) -> list[tuple[int, int]]:
    """(queries, keys) of sequences that hold all queries, in order, and all `keys` but the last.

    They are the samples, and between them pieces of padding, none longer than the longest sample
    where that is possible. Queries without keys between them belong to the sample before. Keys at
    the end that outnumber the queries there are left out.
    """
    found: list[tuple[int, int]] = []
    longest = max(spans.lengths), max(spans.key_lengths)
    row = key_row = 0
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


def attention_for(device: torch.device, dtype: torch.dtype) -> Attend:
    """The fastest implementation that this device and type have."""
    # Tensors without values take a GPU's way: with them its operations are counted and checked.
    flash = device.type in ("cuda", "meta") and dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda":
        use_newest_flash(torch.cuda.get_device_capability(device)[0])
    return attend_packed if flash else attend_by_runs


@cache
def use_newest_flash(generation: int) -> None:
    """Makes `varlen_attn` call FlashAttention 3 where it is installed, on the Hopper it is for.

    A choice that the process has made before stays.
    """
    known = generation == 9 and "FA3" in nn_attention.list_flash_attention_impls()
    if known and find_spec(_FLASH_3) and nn_attention.current_flash_attention_impl() is None:
        nn_attention.activate_flash_attention_impl("FA3")
