"""Fill of packs and balance of ranks, on the mixtures that stand for real data."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from measuring.packing_simulation import (
    MIXTURES,
    alike,
    decreasing_fill,
    in_order,
    packs,
    padded,
    simulated_steps,
    straggler_ratios,
    stream_fill,
)

from dit.config import Balance
from dit.models.dit.family import DitConfig

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


@pytest.mark.parametrize("balance", [Balance.FLOPS, Balance.FLOPS_TARGET])
def test_balance_gives_every_pack_once(balance):
    costs = np.random.default_rng(1).integers(1, 10**6, 500).astype(float).tolist()
    stream = ((cost, 1, 1, number, number) for number, cost in enumerate(costs))
    order = [pack[0] for pack in islice(in_order(stream, balance, packs=32), 400)]
    assert len(set(order)) == 400
    assert set(order) <= set(costs[:432])


def test_balance_makes_ranks_alike_and_packs_of_one_cost_where_samples_allow_it():
    def steps(balance):
        sizes = {"ranks": 12, "steps": 12, "balance_packs": 32}
        return simulated_steps(MIXTURES[1], MODEL, balance=balance, **sizes)

    none, ordered, formed = (steps(balance) for balance in Balance)
    spreads = [one.costs.std() / one.costs.mean() for one in (none, ordered, formed)]
    ratios = [straggler_ratios(one.costs, ranks=[12])[0] for one in (none, ordered, formed)]
    assert ratios[1] - 1 < (ratios[0] - 1) / 3
    assert ratios[2] < ratios[1]
    assert spreads[2] < min(spreads[:2]) / 2
    assert alike(formed.mean_lengths) < 0.5 < alike(ordered.mean_lengths)
    assert formed.fill > none.fill - 0.005


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: mixture.name)
def test_packs_of_like_cost_are_as_full_and_nobody_waits_longer(mixture):
    def cost(length):
        return length * (10_000.0 + length)

    made = list(islice(packs(mixture, buffer=100, seed=1, cost=cost), 250))[50:]
    lengths = [length for pack in made for _, length in pack]
    assert sum(lengths) >= 0.985 * len(made) * mixture.capacity
    newest = np.maximum.accumulate([pack[-1][0] for pack in made])
    assert max(newest - [pack[0][0] for pack in made]) < 100 * 10


def test_straggler_ratio_is_slowest_over_mean():
    costs = np.array([[1.0, 4.0], [3.0, 4.0], [8.0, 4.0]])
    assert straggler_ratios(costs, ranks=[2, 3]) == [1.25, 1.5]
