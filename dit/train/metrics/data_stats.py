"""Which samples training reads: how long they are, and from which dataset.

tokens_per_sample             histogram since the last log step, over all ranks: [n, count] for each
                              bin that has samples, which are at most n tokens long and, but for
                              rounding, more than n / 1.09; the bins are the same at every step
tokens_per_sample_mean        of the same samples
tokens_per_sample_p10, ...    so many percent are at most so long, to within a tenth
epoch                         samples since the data began over those of the dataset
samples_NAME, epoch_NAME      the same for the dataset NAME of a blend
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.train.progress import TrainProgress

Bins = Sequence[tuple[int, int]]  # the longest sample that a bin may have, and how many it has

_PER_OCTAVE = 8
"""Bins of the histogram of lengths between n and 2 n tokens."""
_PERCENTS = (10, 50, 90)


def of_datasets(packs: Iterable[PackedBatch], names: Sequence[str]) -> dict[str, int]:
    """Samples of each dataset of a blend, whose name begins their keys."""
    found = Counter(key.partition("/")[0] for pack in packs for key in pack.keys)
    return {name: found[name] for name in names}


class DataStats:
    """Counts of this rank since the last log step: a histogram of lengths, and tokens."""

    def __init__(self, *, capacity: int, sizes: Mapping[str, int]):
        """`sizes` has the samples of each dataset by the prefix of its keys; "" alone has none."""
        self.sizes = sizes
        self.names = [name for name in sizes if name]
        bins = math.ceil(_PER_OCTAVE * math.log2(capacity)) + 1
        self.samples_of_length = torch.zeros(bins, dtype=torch.float64)
        self.tokens = torch.zeros(1, dtype=torch.float64)

    @property
    def sums(self) -> dict[str, Tensor]:
        """What is added up, by the metric that it makes."""
        return {
            "tokens_per_sample.samples": self.samples_of_length,
            "tokens_per_sample.tokens": self.tokens,
        }

    def add(self, packs: Sequence[PackedBatch]) -> None:
        for pack in packs:
            for tokens in pack.num_tokens:
                self.samples_of_length[math.ceil(_PER_OCTAVE * math.log2(tokens))] += 1
            self.tokens += sum(pack.num_tokens)

    def values(self, sums: Mapping[str, Tensor], progress: TrainProgress) -> dict[str, Any]:
        """The numbers of the module's page from the sums of all ranks."""
        histogram = sums["tokens_per_sample.samples"].tolist()
        tokens = float(sums["tokens_per_sample.tokens"])
        values: dict[str, Any] = {}
        bins = [(_longest(i), int(count)) for i, count in enumerate(histogram) if count]
        if bins:
            values["tokens_per_sample"] = bins
            values["tokens_per_sample_mean"] = tokens / sum(histogram)
            for percent in _PERCENTS:
                values[f"tokens_per_sample_p{percent}"] = float(_percentile(bins, percent / 100))
        for name in self.names:
            taken = progress.of_datasets.get(name, 0)
            values |= {f"samples_{name}": taken, f"epoch_{name}": taken / self.sizes[name]}
        if set(self.sizes) == {""}:
            taken = progress.consumed_samples - progress.samples_before
            values["epoch"] = taken / self.sizes[""]
        return values


def _longest(index: int) -> int:
    """Tokens of the longest sample that a bin may have."""
    return math.floor(2 ** (index / _PER_OCTAVE))


def _percentile(bins: Bins, part: float) -> int:
    """The upper end of the bin in which the smallest `part` of the samples ends."""
    wanted, count = part * sum(count for _, count in bins), 0
    for longest, here in bins:
        count += here
        if count >= wanted:
            return longest
    raise AssertionError("an empty histogram")


def edges_and_counts(bins: Bins) -> tuple[list[float], list[int]]:
    """Bins side by side, with empty ones in the gaps: n + 1 rising edges of n counts."""
    edges: list[float] = []
    counts: list[int] = []
    for longest, count in bins:
        shorter = longest / 2 ** (1 / _PER_OCTAVE)
        if not edges:
            edges.append(shorter)
        elif shorter > edges[-1]:
            edges.append(shorter)
            counts.append(0)
        edges.append(float(longest))
        counts.append(count)
    return edges, counts
