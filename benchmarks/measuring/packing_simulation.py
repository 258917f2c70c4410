"""Simulates packing and balance on sample lengths: how full packs and how even ranks are.

1. Mixture, MIXTURES             sample lengths of realistic data, in tokens of 16 x 16 pixels and
                                 four frames. Pictures have one of seven aspect ratios. Videos have
                                 4 n + 1 frames, as a VAE that halves time twice makes n + 1 latent
                                 frames of them, or any number where it pads
2. stream_fill, decreasing_fill  lengths -> fill of packs, and the time to choose them
3. simulated_steps               lengths -> the cost of packs by rank and step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, count, islice

import numpy as np

from dit.bin_packing import RECENT, best_fit_decreasing, full_packs, nearest_in_cost, turn
from dit.config import Balance, ModelConfig
from dit.sizing.flops import forward_flops

_ASPECTS = np.array([1, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9, 9 / 16])
_PICTURES = (256, 384, 512, 768, 1024)
_480P = 30 * 52  # tokens of a frame of 480 x 832 pixels
_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """A distribution of sample lengths in tokens, and the capacity of their packs."""

    name: str
    capacity: int
    """Most tokens in a pack."""
    pictures: float
    """Fraction of pictures among the samples; the others are videos."""
    videos: Callable[[np.random.Generator, int], np.ndarray]

    def lengths(self, *, seed: int) -> Iterator[int]:
        """Yields sample lengths in tokens, endlessly; samples longer than a pack are left out."""
        rng = np.random.default_rng(seed)
        while True:
            still = rng.random(_AT_ONCE) < self.pictures
            pictures = _frames(rng, _PICTURES, _AT_ONCE)
            chosen = np.where(still, pictures, self.videos(rng, _AT_ONCE))
            yield from chosen[chosen <= self.capacity].tolist()


def _frames(rng: np.random.Generator, sides: Sequence[int], number: int) -> np.ndarray:
    """Tokens of `number` random frames; integers [number].

    Each frame has the area of a square whose side, in pixels, is one of `sides`, and a random
    aspect ratio.
    """
    side, aspect = rng.choice(sides, number), rng.choice(_ASPECTS, number)
    rows, columns = side / np.sqrt(aspect) / 16, side * np.sqrt(aspect) / 16
    return np.round(rows).astype(int) * np.round(columns).astype(int)


def _short(rng: np.random.Generator, number: int) -> np.ndarray:
    return _frames(rng, (256, 320, 384), number) * rng.integers(5, 32, number)


def _standard(rng: np.random.Generator, number: int) -> np.ndarray:
    return _480P * rng.integers(5, 22, number)


def _any_length(rng: np.random.Generator, number: int) -> np.ndarray:
    latent_frames = (rng.integers(16, 122, number) - 1) // 4 + 1
    return _frames(rng, (256, 320, 384, 480), number) * latent_frames


MIXTURES = (
    # 70% pictures of 256 to 1024 pixels a side, and video of 17 to 121 frames at 256 to 384
    Mixture(name="A/16k", capacity=16384, pictures=0.7, videos=_short),
    Mixture(name="A/32k", capacity=32768, pictures=0.7, videos=_short),
    # 50% pictures, and video of 17 to 81 frames at 480 x 832; the longest fills a pack
    Mixture(name="B/32k", capacity=32768, pictures=0.5, videos=_standard),
    # pictures only
    Mixture(name="C/8k", capacity=8192, pictures=1.0, videos=_short),
    # 50% pictures, and video of any 16 to 121 frames at 256 to 480
    Mixture(name="D/32k", capacity=32768, pictures=0.5, videos=_any_length),
)

_CAPTION, _BUFFER = 200, 100  # of the simulated balance: text tokens of a sample, buffered samples
MULTIPLE = 16
"""Samples are padded to a multiple of this number of tokens, as by dataset.sample_multiple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """Fill of the packs made from one stream of samples."""

    packs: int
    real: float
    """Real tokens over capacity."""
    padded: float
    """Tokens, with the padding of samples, over capacity."""
    milliseconds: float
    """Mean time to choose the samples of a pack, in milliseconds."""
    longest_wait: int
    """Largest number of later samples that arrived before a waiting sample was put into a pack."""


def packs(
    mixture: Mixture, *, buffer: int, seed: int, cost: Callable[[int], float] | None = None
) -> Iterator[list[tuple[int, int]]]:
    """Yields the samples of each pack as a list of (number in the stream, length), endlessly.

    `buffer` is the number of samples to choose from. If `cost` (length -> cost) is given, packs get
    nearly equal costs.
    """
    return full_packs(
        enumerate(mixture.lengths(seed=seed)),
        length=lambda sample: padded(sample[1]),
        cost=cost and (lambda sample: cost(sample[1])),
        capacity=mixture.capacity,
        buffer=buffer,
    )


def padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def stream_fill(mixture: Mixture, *, buffer: int, samples: int, seed: int = 0) -> Fill:
    """Packs at least `samples` samples of a stream, and measures the packs.

    As many samples as the buffer holds are packed before that and do not count.
    """
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

    First-fit decreasing, the usual rule, results in the same fill.
    """
    stream = mixture.lengths(seed=seed)
    bins = tokens = 0
    for _ in range(max(1, samples // buffer)):
        lengths = list(islice(stream, buffer))
        bins += len(best_fit_decreasing(list(map(padded, lengths)), capacity=mixture.capacity))
        tokens += sum(lengths)
    return tokens / (bins * mixture.capacity)


def straggler_ratios(costs: np.ndarray, *, ranks: Sequence[int]) -> list[float]:
    """Cost of the slowest rank over the mean cost, averaged over steps, for each number in `ranks`.

    `costs` are [rank, step]; for a number n only the first n ranks count. A step waits for its
    slowest rank, so it takes longer by this factor.
    """
    return [float((costs[:n].max(0) / costs[:n].mean(0)).mean()) for n in ranks]


def alike(values: np.ndarray) -> float:
    """Fraction of the variance over packs that lies between steps; `values` are [rank, step].

    1: the packs of a step are of one kind; 0: each step has packs of all kinds.
    """
    return float(values.mean(0).var() / values.var())


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Figures of simulated steps, over all ranks."""

    costs: np.ndarray
    """FLOPs of a forward pass of each pack, [rank, step]."""
    mean_lengths: np.ndarray
    """Mean tokens of a sample in each pack, [rank, step]."""
    fill: float
    """Real tokens over capacity, as the mean of all packs."""
    longest_wait: int
    """Largest number of later samples that arrived before a waiting sample was trained on."""


def simulated_steps(
    mixture: Mixture,
    model: ModelConfig,
    *,
    ranks: int,
    steps: int,
    balance: Balance,
    balance_packs: int,
) -> Steps:
    """Simulates `steps` training steps on `ranks` ranks, after the steps that fill the buffers.

    `balance` and `balance_packs` decide the order of a rank's packs, as dataset.balance and
    dataset.balance_packs do.
    """
    first = 32 if balance is Balance.NONE else 2 * balance_packs
    rows = []
    for rank in range(ranks):
        stream = _measured(mixture, model, seed=rank, at_like_cost=balance is Balance.FLOPS_TARGET)
        ordered = in_order(stream, balance, packs=balance_packs)
        rows.append([*islice(ordered, first, first + steps)])
    table = np.array(rows)
    return Steps(
        costs=table[..., 0],
        mean_lengths=table[..., 1] / table[..., 2],
        fill=float(table[..., 1].mean()) / mixture.capacity,
        longest_wait=int((table[..., 4] - table[..., 3]).max()),
    )


_Pack = tuple[float, ...]
"""A pack: (cost, tokens, samples, number of its oldest sample, number of the newest sample read so
far)."""


def _measured(
    mixture: Mixture, model: ModelConfig, *, seed: int, at_like_cost: bool
) -> Iterator[_Pack]:
    cost = cache(lambda length: float(forward_flops(model, tokens=[length], text=[_CAPTION])))
    newest = 0
    for pack in packs(mixture, buffer=_BUFFER, seed=seed, cost=cost if at_like_cost else None):
        newest = max(newest, *(number for number, _ in pack))
        lengths = [length for _, length in pack]
        yield sum(map(cost, lengths)), sum(lengths), len(lengths), pack[0][0], newest


def in_order(stream: Iterator[_Pack], balance: Balance, *, packs: int) -> Iterator[_Pack]:
    """Yields the packs of `stream`, the packs of one rank, in the order in which it trains on them.

    `balance` decides the order, and `packs` is the largest number of packs to choose from. The last
    value of each pack is replaced by the number of the newest sample read by then.
    """
    waiting: list[_Pack] = []
    recent: list[float] = []
    for number in count():
        now = turn(number, packs=packs, seed=0)
        wanted = 1 if balance is Balance.NONE else now.waiting
        waiting += (arrived := [*islice(stream, wanted - len(waiting))])
        costs = [pack[0] for pack in waiting]
        if balance is Balance.FLOPS_TARGET:
            recent = [*recent, *(pack[0] for pack in arrived)][-RECENT * packs :]
            chosen = nearest_in_cost(costs, recent, quantile=(now.place + 0.5) / now.waiting)
        else:
            chosen = sorted(range(wanted), key=costs.__getitem__)[min(now.place, wanted - 1)]
        newest = waiting[-1][-1]
        yield *waiting.pop(chosen)[:-1], newest
