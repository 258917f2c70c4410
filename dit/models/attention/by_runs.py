"""Attention by torch's SDPA, one call for neighbours of equal lengths."""

# T query tokens, S key tokens, H heads, K head width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dit.models.attention.spans import Spans


def attend_by_runs(
    q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans, *, together: bool = True
) -> Tensor:
    """SDPA, one batched call for neighbours of equal lengths: the fastest way on a CPU.

    The loader lays samples of equal lengths side by side, so nothing has to be gathered. Unless
    `together`, each sample has a call of its own, so that there are fewer shapes of calls.
    """
    runs: list[_Run] = spans.once(  # type: ignore[assignment]
        "runs" if together else "samples", lambda: list(_runs(spans, len(k_SHK), together=together))
    )
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


def _runs(spans: Spans, keys: int, *, together: bool) -> Iterator[_Run]:
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
        while (
            together
            and count < len(samples)
            and samples[count]
            == (
                *(first + count * step, length),
                *(key_first + count * key_step, key_length),
            )
        ):
            count += 1
        if first + count * step > spans.total or key_first + count * key_step > keys:
            count -= 1
        if count < 2:
            count, step, key_step = 1, length, key_length
        yield _Run(_Even(first, count, step, length), _Even(key_first, count, key_step, key_length))
        del samples[:count]
