"""Fill of packs and balance of ranks, on the mixtures that stand for real data."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from measuring.mixtures import MIXTURES
from measuring.packing_simulation import (
    _balanced,
    decreasing_fill,
    packs,
    padded,
    step_costs,
    straggler_ratios,
    stream_fill,
)

from dit.models.dit.config import DitConfig

MODEL = DitConfig(name="dit_xl")


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: mixture.name)
def test_a_buffer_of_64_fills_packs(mixture):
    fill = stream_fill(mixture, buffer=64, samples=3000)
    assert fill.real >= 0.985
    assert fill.real >= decreasing_fill(mixture, buffer=64, samples=3000)
    assert fill.padded > fill.real
    assert fill.longest_wait < 64 * 10


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: mixture.name)
@pytest.mark.parametrize("buffer", [32, 256])
def test_never_below_decreasing_order_of_whole_buffers(mixture, buffer):
    ours = stream_fill(mixture, buffer=buffer, samples=2048).real
    assert ours >= decreasing_fill(mixture, buffer=buffer, samples=2048)


def test_the_stream_goes_into_packs_that_fit_and_loses_nobody():
    mixture = MIXTURES[1]
    made = list(islice(packs(mixture, buffer=64, seed=3), 200))
    gone = sorted(number for pack in made for number, _ in pack)
    assert len(gone) == len(set(gone))
    assert gone[-1] + 1 - len(gone) < 64
    assert all(sum(padded(n) for _, n in pack) <= mixture.capacity for pack in made)
    lengths = list(islice(mixture.lengths(seed=3), gone[-1] + 1))
    assert all(lengths[number] == length for pack in made for number, length in pack)


def test_balance_gives_every_pack_once_and_makes_ranks_alike():
    costs = np.random.default_rng(1).integers(1, 10**6, 500).tolist()
    order = _balanced(costs, 400, 32)
    assert len(set(order)) == 400
    assert set(order) <= set(costs[:432])
    before, after = (
        step_costs(MIXTURES[4], MODEL, ranks=16, steps=64, balance_packs=packs)[:, 32:]
        for packs in (0, 32)
    )
    (was,), (now,) = (straggler_ratios(costs, ranks=[16]) for costs in (before, after))
    assert now - 1 < (was - 1) / 3


def test_straggler_ratio_is_slowest_over_mean():
    costs = np.array([[1.0, 4.0], [3.0, 4.0], [8.0, 4.0]])
    assert straggler_ratios(costs, ranks=[2, 3]) == [1.25, 1.5]
