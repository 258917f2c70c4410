"""Chooses the samples that share a pack, and the next pack, by lengths and costs.

1. full_with_first, best_fit_decreasing    full packs of samples
2. full_at_like_cost                       full packs of about equal cost
3. full_packs, mean_fill                   the packs of a stream of samples, and how full they get
4. turn, nearest_in_cost                   the next pack, chosen so that ranks have equal cost
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, repeat, takewhile
from math import gcd
from typing import TypeVar

import numpy as np

# Only the oldest samples of a longer buffer are tried, unless they are so short that all of them
# fit into one pack: 256 fill packs as well as 4096 do.
CANDIDATES = 256
# Packs that differ by less than capacity / 100 count as equally full; with more candidates,
# by less than capacity / candidates. If the fullest were always taken, samples that leave odd gaps
# would stay behind until the stream ends: 5% more packs for 430 samples of awkward lengths.
_AS_FULL = 100
# `full_at_like_cost`: candidates (the oldest and others), and how fine their sums are. With more
# candidates packs are not fuller and their costs not closer, but the search takes longer.
_OLD, _OTHERS = 24, 40
_ROWS = 4096  # units of length in a pack, at most
_STEPS = 32  # steps of cost from the cheapest pack to the wanted one; 64 bits hold twice as many
_AS_FULL_AT_COST = 200  # packs that differ by less than capacity / 200 count as equally full
RECENT = 8
"""How many recent packs `nearest_in_cost` considers, as a multiple of the waiting packs."""
_PULL = 0.2  # weight of the waiting packs in the target cost of `nearest_in_cost`
_AS_DEAR = 0.002  # packs that miss the target by less than this fraction keep their order
_FIRST_WAITING = 8  # packs that wait at the first turn; more of them would delay it
MOST_IN_A_PASS = 2000
"""Number of samples in a simulated pass; with more, the fill is the same."""
_PACKS, _ENOUGH = 300, 30_000  # packs, or samples in packs, after which a simulation ends

Sample = TypeVar("Sample")


def full_with_first(lengths: Sequence[int], *, capacity: int) -> list[int]:
    """Indices of a pack with sample 0, the oldest, as full as `capacity` tokens allow.

    All other samples wait for the next pack, and new samples replace those that were taken. With a
    buffer of 64 samples this fills packs better than best-fit decreasing does with 4096, and no
    sample waits for ever. Among packs that are equally full, within 1%, the one with the longest
    samples is taken, because short ones fill gaps later. Indices ascend.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    _check(lengths, capacity)
    unit = gcd(*lengths)
    together = 1 + sum(1 for _ in takewhile(capacity.__gt__, accumulate(lengths)))
    candidates = range(1, min(len(lengths), max(CANDIDATES, together)))
    order = sorted(candidates, key=lambda i: (lengths[i], i))
    alike = [(n // unit, [*group]) for n, group in groupby(order, key=lengths.__getitem__)]
    room = (capacity - lengths[0]) // unit
    # Bit n of sums[k] is set if some candidates of the k shortest lengths add up to n units.
    sums, within = [1], (1 << room + 1) - 1
    for units, group in alike:
        copies = min(len(group), room // units)
        sums.append(_with_copies(sums[-1], units, copies=copies) & within)
    empty = max(room + 1 - sums[-1].bit_length(), capacity // max(_AS_FULL, len(order)) // unit)
    chosen = [0]
    for (units, group), shorter in zip(reversed(alike), reversed(sums[:-1]), strict=True):
        for copies in range(min(len(group), room // units), 0, -1):
            without = room - units * copies
            # Taken if shorter ones can fill the rest, up to the room that may stay empty.
            if shorter >> max(without - empty, 0) & (1 << min(without, empty) + 1) - 1:
                room = without
                chosen += group[:copies]
                break
    return sorted(chosen)


def _with_copies(sums: int, units: int, *, copies: int) -> int:
    """`sums`, a bit mask of sums, and the sums with up to `copies` more terms of `units`."""
    at_once = 1
    while copies:
        at_once = min(at_once, copies)
        sums |= sums << units * at_once
        copies -= at_once
        at_once *= 2
    return sums


def best_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Bins of indices of `lengths`, each of at most `capacity` tokens, with every index once.

    The longest goes first, each into the bin where it leaves the least room; of equal lengths the
    earlier one goes first. Indices ascend within a bin, and bins are sorted by their first index,
    so the order of training does not follow the lengths.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    _check(lengths, capacity)
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tightest = bisect_left(room, (lengths[index], -1))
        if tightest < len(room):
            left, chosen = room.pop(tightest)
        else:
            left, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return sorted(sorted(members) for members in bins)


def _check(lengths: Sequence[int], capacity: int) -> None:
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(
                f"lengths[{index}]={length} must lie in [1, {capacity}], the capacity of a pack;"
                " leave this sample out, or raise the capacity"
            )


def full_at_like_cost(
    lengths: Sequence[int], costs: Sequence[float], *, capacity: int
) -> list[int]:
    """Indices of a pack with sample 0, of average cost, about as full as one of `full_with_first`.

    Cost grows with the square of a length, so a pack with one long sample costs more than others
    whatever fills it: it gets the cheapest samples. The other packs divide the remaining cost
    equally, so each resembles the waiting samples as a whole. If such a pack has more empty room
    than the pack of `full_with_first`, by over 1% of the capacity, the pack of `full_with_first`
    is returned. Among equal samples the oldest is taken. Indices ascend.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    _check(lengths, capacity)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    short = order[: max(1, len(order) // 4)]
    filler = sum(costs[i] for i in short) / sum(lengths[i] for i in short)
    # What a full pack with this sample costs at least.
    least = [c + filler * (capacity - n) for n, c in zip(lengths, costs, strict=True)]
    aim = max(least[0], _even_share(least, cost=sum(costs), packs=sum(lengths) / capacity))
    free = [i for i in order if i > 0 and least[i] <= aim and lengths[i] <= capacity - lengths[0]]
    chosen = _nearest_sum(lengths, costs, _mixed(free), capacity=capacity, aim=aim)
    room = capacity - sum(lengths[i] for i in chosen)
    if room * _AS_FULL > capacity:
        full = full_with_first(lengths, capacity=capacity)
        if (sum(lengths[i] for i in full) - capacity + room) * _AS_FULL > capacity:
            return full
    return chosen


def _even_share(least: Sequence[float], *, cost: float, packs: float) -> float:
    """Cost of each pack if all cost the same, except packs that must cost more (`least`)."""
    for dear in sorted(least, reverse=True):
        if packs <= 1 or dear <= cost / packs:
            break
        cost, packs = cost - dear, packs - 1
    return cost / packs


def _mixed(ascending: Sequence[int]) -> list[int]:
    """Candidates from samples sorted by length: the oldest, and others spread over all lengths."""
    old = sorted(ascending)[:_OLD]
    others = sorted(ascending, key=set(old).__contains__)[: len(ascending) - len(old)]
    step = max(1.0, len(others) / _OTHERS)
    return sorted([*old, *(others[int(n * step)] for n in range(min(len(others), _OTHERS)))])


def _nearest_sum(
    lengths: Sequence[int],
    costs: Sequence[float],
    candidates: Sequence[int],
    *,
    capacity: int,
    aim: float,
) -> list[int]:
    """Indices of sample 0 and `candidates` that fill a pack to a cost near `aim`.

    It enumerates subset sums in two dimensions: bit b of the number at n says that some candidates
    have a length of n units together, and cost b steps more than at the cheapest rate.
    """
    used = (0, *candidates)
    unit = max(gcd(capacity, *(lengths[i] for i in used)), -(-capacity // _ROWS))
    room = (capacity - lengths[0]) // unit
    rate = min(costs[i] / lengths[i] for i in used)
    above = [costs[i] - rate * lengths[i] for i in used]
    step = max(aim - rate * capacity, aim / 100) / _STEPS
    start = round(above[0] / step)
    items = [(i, -(-lengths[i] // unit), round(a / step)) for i, a in zip(used, above, strict=True)]
    items = [(i, n, more) for i, n, more in items[1:] if n <= room and more < 64]
    sums = [np.zeros(room + 1, np.uint64)]
    sums[0][0] = 1
    for _, n, more in items:
        sums.append(sums[-1].copy())
        sums[-1][n:] |= sums[-2][:-n] << np.uint64(more)
    at, bit = _place(
        sums[-1], max(round((aim - rate * capacity) / step) - start, 0), capacity // unit
    )
    chosen = [0]
    for (index, n, more), without in zip(reversed(items), reversed(sums[:-1]), strict=True):
        if not without.item(at) >> bit & 1:
            at, bit = at - n, bit - more
            chosen.append(index)
    return sorted(chosen)


def _place(sums: np.ndarray, wanted: int, capacity: int) -> tuple[int, int]:
    """(length in units, bit) of the sum nearest in cost to `wanted`, among equally full ones."""
    fullest = int(np.flatnonzero(sums)[-1])
    best = (64, 0, 0)
    for at in range(fullest, max(fullest - capacity // _AS_FULL_AT_COST, 0) - 1, -1):
        bits = sums.item(at)
        below, higher = bits & (2 << wanted) - 1, bits >> wanted << wanted
        for bit in (below.bit_length(), (higher & -higher).bit_length()):
            if bit:
                best = min(best, (abs(bit - 1 - wanted), -at, bit - 1))
    return -best[1], best[2]


def full_packs(
    arrivals: Iterator[Sample],
    *,
    length: Callable[[Sample], int],
    cost: Callable[[Sample], float] | None = None,
    capacity: int,
    buffer: int,
) -> Iterator[list[Sample]]:
    """Yields the packs that a loader makes of the endless stream `arrivals` of samples.

    `length` and `cost` return the tokens and the relative cost of a sample; with `cost`, packs have
    about equal costs. `buffer` samples wait, or more if a pack holds more. `capacity` is in tokens.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    waiting: list[Sample] = []
    while True:
        waiting += islice(arrivals, max(0, buffer - len(waiting)))
        lengths = [length(sample) for sample in waiting]
        held = sum(lengths)
        while held < capacity:
            waiting.append(next(arrivals))
            lengths.append(length(waiting[-1]))
            held += lengths[-1]
        if cost is None:
            chosen = full_with_first(lengths, capacity=capacity)
        else:
            costs = [cost(sample) for sample in waiting]
            chosen = full_at_like_cost(lengths, costs, capacity=capacity)
        yield [waiting[index] for index in chosen]
        taken = set(chosen)
        waiting = [sample for index, sample in enumerate(waiting) if index not in taken]


def mean_fill(
    counts: Mapping[int, float],
    *,
    capacity: int,
    buffer: int,
    cost: Callable[[int], float] | None = None,
    one_pass: int = MOST_IN_A_PASS,
) -> float:
    """The mean fraction of a pack's `capacity` that samples fill, from simulated packs.

    `counts` maps each length in tokens to its frequency, `buffer` is the number of waiting samples,
    and `cost` maps a length to its cost (see `full_packs`). `one_pass` samples with these
    frequencies come in random order, all once before any repeats. With the result, N samples make
    N * mean length / (result * capacity) packs.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    # One pass: lengths in their proportions, of which a random draw would miss some.
    lengths = np.array(sorted(counts))
    ends = np.cumsum([counts[length] for length in sorted(counts)], dtype=float)
    middles = (np.arange(one_pass) + 0.5) / one_pass * ends[-1]
    each = lengths[np.searchsorted(ends, middles)]
    rng = np.random.default_rng(0)
    arrivals = (length for _ in repeat(0) for length in rng.permutation(each).tolist())
    packs = samples = tokens = 0
    for pack in full_packs(arrivals, length=int, cost=cost, capacity=capacity, buffer=buffer):
        packs, samples, tokens = packs + 1, samples + len(pack), tokens + sum(pack)
        if samples % one_pass < len(pack) and (packs >= _PACKS or samples >= _ENOUGH):
            break
    return tokens / (packs * capacity)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Which of its waiting packs a rank takes at one turn."""

    waiting: int
    """Number of packs to choose from: one more each turn, up to the most."""
    place: int
    """Index of the chosen pack in ascending order of cost."""


def turn(number: int, *, packs: int, seed: int) -> Turn:
    """The choice that every rank makes at its turn `number` among at most `packs` waiting packs.

    A step takes as long as its slowest rank. Ranks read different samples and do not communicate
    meanwhile, but the distribution of their packs is the same. So each rank keeps some packs
    waiting, and at the n-th turn all ranks take the pack at the same place in the order of cost.
    In every `packs` turns each place comes once, in random order; at the beginning, while fewer
    packs wait, some places come more often.
    """
    cycle, within = divmod(number, packs)
    order = np.random.default_rng((seed, cycle)).permutation(packs)
    waiting = min(packs, _FIRST_WAITING + number)
    return Turn(waiting=waiting, place=int(order[within]) * waiting // packs)


def nearest_in_cost(waiting: Sequence[float], recent: Sequence[float], *, quantile: float) -> int:
    """Index of the waiting pack whose cost is nearest to a target, about equal on all ranks.

    `waiting` and `recent` are costs of packs. The target is mostly the cost at this `quantile` of
    the packs that this rank has recently made, which are more than those that wait. With this
    target alone the waiting packs of some costs would run out, so it is moved by the fraction
    `_PULL` towards the same quantile of the waiting packs. Among packs within 0.2% of the target
    the oldest is taken, so packs of equal cost keep their order.
    """
    own, usual = (
        float(np.quantile(costs, quantile, method="hazen")) for costs in (waiting, recent)
    )
    aim = usual + _PULL * (own - usual)
    return int(np.maximum(np.abs(np.asarray(waiting) - aim), _AS_DEAR * aim).argmin())
