"""Which of the packs in waiting is next, so that all ranks train packs of like cost at a time.

A step takes as long as its slowest rank. Ranks read different samples and never speak with each
other while they do; but their packs are alike as a whole. So each keeps some packs in waiting, and
all take at their n-th turn the one at the same place in the order of cost: the cheapest, say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Packs in waiting at the first turn, which comes the later the more there are.
_AT_FIRST = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a rank does at one turn."""

    waiting: int
    """Packs to choose from: one more each turn, until there are as many as are wanted."""
    place: int
    """Of the chosen one, counted from the cheapest."""


def turn(number: int, *, packs: int, seed: int) -> Turn:
    """Turn `number` of any rank; in `packs` turns each place comes once, in random order."""
    cycle, within = divmod(number, packs)
    order = np.random.default_rng((seed, cycle)).permutation(packs)
    waiting = min(packs, _AT_FIRST + number)
    return Turn(waiting=waiting, place=int(order[within]) * waiting // packs)
