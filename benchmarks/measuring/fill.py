"""How full packs get, and how long that takes: the loader's rule on lengths alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from dit.data.pack import best_fit_decreasing, full_with_first
from measuring.mixtures import Mixture

MULTIPLE = 16
"""Samples are padded to a multiple of this, as dataset.sample_multiple does by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """Of the packs made of one stream."""

    packs: int
    real: float
    """Real tokens over capacity."""
    padded: float
    """Tokens with the padding of samples, over capacity."""
    milliseconds: float
    """To choose the samples of one pack, mean."""
    longest_wait: int
    """Samples that came after one and before its pack was made, at most."""


def packs(mixture: Mixture, *, buffer: int, seed: int) -> Iterator[list[tuple[int, int]]]:
    """(sample number, length) of the samples of each pack, for ever."""
    arrivals = enumerate(mixture.lengths(seed=seed))
    waiting: list[tuple[int, int]] = []
    while True:
        waiting += islice(arrivals, buffer - len(waiting))
        chosen = full_with_first(
            [padded(length) for _, length in waiting], capacity=mixture.capacity
        )
        yield [waiting[index] for index in chosen]
        for index in reversed(chosen):
            del waiting[index]


def padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def stream_fill(mixture: Mixture, *, buffer: int, samples: int, seed: int = 0) -> Fill:
    """Of packs until `samples` have gone, after as many as the buffer holds."""
    stream = packs(mixture, buffer=buffer, seed=seed)
    gone = 0
    while gone < buffer:
        gone += len(next(stream))
    made, gone, wait, newest, spent = [], 0, 0, 0, 0.0
    while gone < samples:
        start = time.perf_counter()
        made.append(pack := next(stream))
        spent += time.perf_counter() - start
        gone += len(pack)
        newest = max(newest, *(number for number, _ in pack))
        wait = max(wait, newest - pack[0][0])
    lengths = [length for _, length in chain(*made)]
    room = len(made) * mixture.capacity
    return Fill(
        packs=len(made),
        real=sum(lengths) / room,
        padded=sum(map(padded, lengths)) / room,
        milliseconds=1e3 * spent / len(made),
        longest_wait=wait,
    )


def decreasing_fill(mixture: Mixture, *, buffer: int, samples: int, seed: int = 0) -> float:
    """Real tokens over capacity, where each whole buffer is packed by best-fit decreasing.

    It fills packs as well as first-fit decreasing, the field's usual rule.
    """
    stream = mixture.lengths(seed=seed)
    bins = tokens = 0
    for _ in range(max(1, samples // buffer)):
        lengths = list(islice(stream, buffer))
        bins += len(best_fit_decreasing(list(map(padded, lengths)), capacity=mixture.capacity))
        tokens += sum(lengths)
    return tokens / (bins * mixture.capacity)
