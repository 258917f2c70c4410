"""How much longer the slowest data-parallel rank takes than the mean, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from dit.config import ModelConfig
from dit.data.energon.flops_balancing import turn
from dit.models.cost import forward_flops
from measuring import fill
from measuring.mixtures import Mixture

_CAPTION = 200  # tokens of every caption
_BUFFER = 64


def straggler_ratios(costs: np.ndarray, *, ranks: Sequence[int]) -> list[float]:
    """Slowest over mean, averaged over steps; `costs` are [rank, step], of as many ranks or more.

    A step waits for its slowest rank, so this is by how much the ranks are slowed down.
    """
    return [float((costs[:n].max(0) / costs[:n].mean(0)).mean()) for n in ranks]


def step_costs(
    mixture: Mixture, model: ModelConfig, *, ranks: int, steps: int, balance_packs: int
) -> np.ndarray:
    """[rank, step] operations of one pack on each rank; `balance_packs` 0 is no balance."""
    rows = [
        _balanced(_costs(mixture, model, steps + balance_packs, seed=rank), steps, balance_packs)
        for rank in range(ranks)
    ]
    return np.array(rows)


def _costs(mixture: Mixture, model: ModelConfig, packs: int, *, seed: int) -> list[int]:
    stream = fill.packs(mixture, buffer=_BUFFER, seed=seed)
    lengths = ([length for _, length in pack] for pack in islice(stream, packs))
    return [forward_flops(model, tokens=one, text=[_CAPTION] * len(one)) for one in lengths]


def _balanced(costs: list[int], steps: int, packs: int) -> list[int]:
    """The first of `costs` in the order of dataset.balance=flops."""
    if not packs:
        return costs[:steps]
    stream, waiting, order = iter(costs), [], []
    for number in range(steps):
        now = turn(number, packs=packs, seed=0)
        waiting = sorted([*waiting, *islice(stream, now.waiting - len(waiting))])
        order.append(waiting.pop(now.place))
    return order
