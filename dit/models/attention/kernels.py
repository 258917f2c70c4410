"""The attention function of each kernel that `model.attention_backend` can name (`ATTEND`).

`attend_packed` is for kernels that take a whole pack in one call and cannot skip padding.
`attend_by_runs` is torch's SDPA, called once for each group of adjacent samples of equal lengths.
The kernels' packages are imported at the first call. `tests/unit/models/test_kernel_calls.py`
compares our calls with the signatures of the packages' functions.
"""

# T query tokens, S key tokens, H heads, K head width, X = H * K

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.attention as nn_attention
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dit.config import AttentionBackend
from dit.models.attention.spans import Attend, Offsets, Spans
from dit.pack_wire import to_device


def attend_by_runs(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """Attention by torch's SDPA, with one batched call for adjacent samples of equal lengths.

    SDPA is the fastest kernel on a CPU. The loader places samples of equal lengths next to each
    other, so a batch of them is a view of the pack.
    """
    runs: list[_Run] = spans.once(  # type: ignore[assignment]
        "runs", lambda: list(_runs(spans, len(k_SHK)))
    )
    pieces, row = [], 0
    for run in runs:
        q = run.queries.rows_of(q_THK)
        k, v = run.keys.rows_of(k_SHK), run.keys.rows_of(v_SHK)
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
    """Rows of samples of equal lengths at equal distances, which a strided view can address."""

    first: int  # first row of the first sample
    count: int  # number of samples
    step: int  # rows from the start of a sample to the start of the next
    length: int  # rows of each sample

    @property
    def stop(self) -> int:
        return self.first + self.count * self.step

    def rows_of(self, x_THK: Tensor) -> Tensor:
        """A view [count, H, length, K] of the rows of `x_THK` that belong to these samples."""
        rows = x_THK[self.first : self.stop].unflatten(0, (self.count, self.step))
        return rows[:, : self.length].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent samples at equal distances, all with the same number of queries, and of keys."""

    queries: _Even
    keys: _Even


def shapes_of_runs(spans: Spans) -> set[tuple[int, int, int]]:
    """(samples, queries of each, keys of each) of every SDPA call of `attend_by_runs`.

    Equal calls are one element.
    """
    runs = _runs(spans, spans.key_starts[-1] + spans.key_lengths[-1])
    return {(run.queries.count, run.queries.length, run.keys.length) for run in runs}


def _runs(spans: Spans, keys: int) -> Iterator[_Run]:
    """Divides all samples into runs: adjacent samples of equal lengths at equal distances.

    A sample that is followed by less padding than the others of its run becomes the first of the
    next run. `keys` is the number of rows of keys.
    """
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
        end = samples[count][0] if count < len(samples) else spans.total
        if first + count * step > end or key_first + count * key_step > keys:
            count -= 1
        if count < 2:
            count, step, key_step = 1, length, key_length
        yield _Run(_Even(first, count, step, length), _Even(key_first, count, key_step, key_length))
        del samples[:count]


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
    """Attention by one call of `kernel`, which takes sequences of any length but needs every row.

    Padding forms separate sequences, because gathering the real tokens would cost more than the
    attention of padding to itself. The outputs of real tokens stay exact: they never attend to
    padding, and outputs of padding have no gradient. Empty sequences are appended until the number
    of sequences is a multiple of `count_multiple`.
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
    """Arguments of a kernel for one pack, computed once for all layers."""

    offsets: Offsets
    keys: slice  # rows of the keys that belong to a sequence
    zeros_T11: Tensor | None  # True at real queries without keys; None if there are no such queries

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
    """`offsets` with empty sequences appended, so that `multiple` divides their number."""
    return offsets + offsets[-1:] * (-(len(offsets) - 1) % multiple)


def first_key(spans: Spans) -> int:
    """Index of the first row of keys that belongs to any sequence.

    A context rank also has text keys of earlier samples, whose queries are on earlier ranks.
    """
    return 0 if spans.starts[0] else spans.key_starts[0]


def sequences(spans: Spans, *, keys: int) -> list[tuple[int, int]]:
    """(number of queries, number of keys) of consecutive sequences that cover the whole pack.

    A sequence is a sample, or a piece of the padding after it; pieces are no longer than the
    longest sample if possible. Padding that has queries but no keys belongs to the sample before.
    `keys` is the number of rows of keys; at the end of the pack, keys of padding beyond the number
    of its queries are left out.
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
        else:  # also if queries come before the first key
            joined[-1] = (joined[-1][0] + queries, joined[-1][1] + its_keys)
    return joined


def _padding(queries: int, keys: int, longest: tuple[int, int]) -> list[tuple[int, int]]:
    """(number of queries, number of keys) of the pieces of the padding between two samples.

    `queries` and `keys` are the rows of that padding; `longest` has the largest number of queries,
    and of keys, of any sample.
    """
    assert queries or not keys, "keys without queries must be at the end of the pack"
    if not queries:
        return []
    wanted = max(-(-queries // longest[0]), -(-keys // longest[1]))
    pieces = max(min(wanted, queries, keys), 1)
    shares = [[n // pieces + (i < n % pieces) for i in range(pieces)] for n in (queries, keys)]
    return list(zip(*shares, strict=True))


COUNT_MULTIPLE = 16
"""Multiple to which the number of sequences is rounded up for Transformer Engine, which builds a
graph for each number of sequences from cuDNN 9.24 on (use_cu_seqlens_directly in its
fused_attn_f16_arbitrary_seqlen.cu)."""
_LENGTH_MULTIPLE = 512
"""Multiple to which the longest length is rounded up for Transformer Engine, which builds a graph
for each longest length with older cuDNN and on sm_120."""


def flash_2_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Attention by torch's built-in FlashAttention 2."""
    return _torch_flash(None, q_THK, k_SHK, v_SHK, offsets)


def flash_3_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Attention by FlashAttention 3, which torch calls if its package is installed."""
    return _torch_flash("FA3", q_THK, k_SHK, v_SHK, offsets)


def _torch_flash(
    version: str | None, q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets
) -> Tensor:
    from torch.nn.attention import varlen

    # After torch 2.13, `varlen_attn` uses cuDNN on Hopper and Blackwell, whatever `sdpa_kernel`
    # says. The backward pass asks `_should_use_cudnn` again, so the replacement must stay.
    varlen._should_use_cudnn = _never
    if nn_attention.current_flash_attention_impl() != version:  # a setting of the process
        if version is None:
            nn_attention.restore_flash_attention_impl()
        else:
            nn_attention.activate_flash_attention_impl(version)
    o = offsets
    out = varlen.varlen_attn(q_THK, k_SHK, v_SHK, o.cu, o.key_cu, o.longest, o.longest_key)
    assert isinstance(out, Tensor)
    return out


def _never(device_index: int) -> bool:  # noqa: ARG001
    return False


def flash_4_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Attention by FlashAttention 4, called without torch.

    Torch expects two results of this kernel, but it returns five.
    """
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]

    out = flash_attn_varlen_func(
        q_THK,
        k_SHK,
        v_SHK,
        cu_seqlens_q=offsets.cu,
        cu_seqlens_k=offsets.key_cu,
        max_seqlen_q=offsets.longest,
        max_seqlen_k=offsets.longest_key,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[0] if isinstance(out, tuple) else out


def engine_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Attention by Transformer Engine, which calls cuDNN's kernel on Hopper and later."""
    heads, width = q_THK.shape[1:]
    out_TX = _engine_module(heads, width)(
        q_THK.contiguous(),
        k_SHK.contiguous(),
        v_SHK.contiguous(),
        qkv_format="thd",
        attn_mask_type="padding",
        cu_seqlens_q=offsets.cu,
        cu_seqlens_kv=offsets.key_cu,
        max_seqlen_q=few_lengths(offsets.longest),
        max_seqlen_kv=few_lengths(offsets.longest_key),
    )
    return out_TX.view(len(q_THK), heads, width)


def few_lengths(longest: int) -> int:
    """`longest` rounded up, so that many packs share one maximal sequence length."""
    return -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


@cache
def _engine_module(heads: int, width: int) -> Any:
    return dot_product(heads, width)


def dot_product(heads: int, width: int, **ring: Any) -> Any:
    """Transformer Engine's attention module for packed samples.

    `ring` are the module's options for context parallelism.
    """
    from transformer_engine.pytorch import DotProductAttention  # type: ignore[import-not-found]

    # An error is better than the unfused form, which keeps T x T numbers.
    os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
    options = {"attention_dropout": 0.0, "qkv_format": "thd", "attn_mask_type": "padding"}
    return DotProductAttention(heads, width, **options, **ring)


def cudnn_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Attention by cuDNN's frontend, or FlashAttention 2 if cuDNN needs too much memory."""
    from dit.models.attention.cudnn_graphs import cudnn_attention, takes_much_space

    tokens, _, width = q_THK.shape
    attend = flash_2_kernel if takes_much_space(offsets, tokens, width) else cudnn_attention
    return attend(q_THK, k_SHK, v_SHK, offsets)


ATTEND: dict[AttentionBackend, Attend] = {
    AttentionBackend.FLASH_4: partial(attend_packed, kernel=flash_4_kernel),
    AttentionBackend.FLASH_3: partial(attend_packed, kernel=flash_3_kernel),
    AttentionBackend.TRANSFORMER_ENGINE: partial(
        attend_packed, kernel=engine_kernel, count_multiple=COUNT_MULTIPLE
    ),
    AttentionBackend.CUDNN: partial(attend_packed, kernel=cudnn_kernel),
    AttentionBackend.FLASH_2: partial(attend_packed, kernel=flash_2_kernel),
    AttentionBackend.SDPA: attend_by_runs,
}
