"""Which samples training reads: how long they are, and from which dataset.

tokens_per_sample_mean        since the last log step, over all ranks
tokens_per_sample_p10, ...    so many percent are at most so long, to within a tenth
samples_NAME                  samples of the dataset NAME of a blend since the last log step
epoch                         passes through the data so far; of a blend nobody could say
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.parallel.groups import device

_PER_OCTAVE = 8
"""Bins of the histogram of lengths between n and 2 n tokens."""
_PERCENTS = (10, 50, 90)


class Seen:
    """Counts of this rank: a histogram of lengths, tokens, samples of each dataset."""

    def __init__(self, *, capacity: int, sizes: Mapping[str, int]):
        """`sizes` has the samples of each dataset by the prefix of its keys; "" alone has none."""
        self.bins = math.ceil(_PER_OCTAVE * math.log2(capacity)) + 1
        self.sizes = sizes
        self.names = [name for name in sizes if name]
        self._clear()

    def _clear(self) -> None:
        self.counts = [0.0] * (self.bins + 1 + len(self.names))

    def add(self, packs: Sequence[PackedBatch]) -> None:
        for pack in packs:
            for tokens, key in zip(pack.num_tokens, pack.keys, strict=True):
                self.counts[math.ceil(_PER_OCTAVE * math.log2(tokens))] += 1
                self.counts[self.bins] += tokens
                name = key.partition("/")[0]
                if name in self.names:
                    self.counts[self.bins + 1 + self.names.index(name)] += 1

    def take(self) -> Tensor:
        """This rank's counts since the last time, float64."""
        counts = torch.tensor(self.counts, dtype=torch.float64, device=device())
        self._clear()
        return counts

    def values(self, counts: Tensor, *, consumed: int) -> dict[str, float]:
        """The numbers of the module's page from the counts of all ranks."""
        histogram, (tokens, *of_names) = counts[: self.bins].tolist(), counts[self.bins :].tolist()
        samples = sum(histogram)
        values: dict[str, float] = {}
        if samples:
            values["tokens_per_sample_mean"] = tokens / samples
            for percent in _PERCENTS:
                values[f"tokens_per_sample_p{percent}"] = _percentile(histogram, percent / 100)
        values |= {f"samples_{n}": count for n, count in zip(self.names, of_names, strict=True)}
        if set(self.sizes) == {""}:
            values["epoch"] = consumed / self.sizes[""]
        return values


def _percentile(histogram: Sequence[float], part: float) -> float:
    """The upper end of the bin in which the smallest `part` of the samples ends."""
    wanted, count = part * sum(histogram), 0.0
    for index, here in enumerate(histogram):
        count += here
        if here and count >= wanted:
            return float(math.floor(2 ** (index / _PER_OCTAVE)))
    raise AssertionError("an empty histogram")
