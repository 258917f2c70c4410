"""Packing and balance on sample lengths alone: how full packs get, and how even ranks are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from dit.config import ModelConfig
from dit.data.pack import best_fit_decreasing, full_with_first, turn
from dit.models.cost import forward_flops
from measuring.mixtures import Mixture

_CAPTION, _BUFFER = 200, 64  # of the simulated balance: text tokens of a sample, buffered samples
MULTIPLE = 16
"""Samples are padded to a multiple of this, as dataset.sample_multiple does by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """Fill of the packs made from one stream of samples."""

    packs: int
    real: float
    """Real tokens over capacity."""
    padded: float
    """Tokens with the padding of samples, over capacity."""
    milliseconds: float
    """Mean time to choose the samples of one pack."""
    longest_wait: int
    """Largest number of samples that arrived between a sample and the pack it went into."""


def packs(mixture: Mixture, *, buffer: int, seed: int) -> Iterator[list[tuple[int, int]]]:
    """(sample number, length) of the samples of each pack, endlessly."""
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
    """Fill of the packs of `samples` samples, after a warm-up of one buffer."""
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
    """Real tokens over capacity, if each whole buffer is packed by best-fit decreasing.

    That fills packs as well as first-fit decreasing, the usual rule.
    """
    stream = mixture.lengths(seed=seed)
    bins = tokens = 0
    for _ in range(max(1, samples // buffer)):
        lengths = list(islice(stream, buffer))
        bins += len(best_fit_decreasing(list(map(padded, lengths)), capacity=mixture.capacity))
        tokens += sum(lengths)
    return tokens / (bins * mixture.capacity)


def straggler_ratios(costs: np.ndarray, *, ranks: Sequence[int]) -> list[float]:
    """Cost of the slowest rank over the mean, averaged over steps; `costs` are [rank, step].

    A step waits for its slowest rank, so this is the factor by which ranks are slowed down.
    """
    return [float((costs[:n].max(0) / costs[:n].mean(0)).mean()) for n in ranks]


def step_costs(
    mixture: Mixture, model: ModelConfig, *, ranks: int, steps: int, balance_packs: int
) -> np.ndarray:
    """FLOPs of one pack, [rank, step]; `balance_packs` 0 is without balancing."""
    rows = [
        _balanced(_costs(mixture, model, steps + balance_packs, seed=rank), steps, balance_packs)
        for rank in range(ranks)
    ]
    return np.array(rows)


def _costs(mixture: Mixture, model: ModelConfig, count: int, *, seed: int) -> list[int]:
    stream = packs(mixture, buffer=_BUFFER, seed=seed)
    lengths = ([length for _, length in pack] for pack in islice(stream, count))
    return [forward_flops(model, tokens=one, text=[_CAPTION] * len(one)) for one in lengths]


def _balanced(costs: list[int], steps: int, packs: int) -> list[int]:
    """The first `steps` of `costs` in the order of dataset.balance=flops."""
    if not packs:
        return costs[:steps]
    stream, waiting, order = iter(costs), [], []
    for number in range(steps):
        now = turn(number, packs=packs, seed=0)
        waiting = sorted([*waiting, *islice(stream, now.waiting - len(waiting))])
        order.append(waiting.pop(now.place))
    return order
