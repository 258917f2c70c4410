from itertools import chain, combinations, cycle
from operator import itemgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit.bin_packing import (
    best_fit_decreasing,
    full_at_like_cost,
    full_packs,
    full_with_first,
    mean_fill,
    nearest_in_cost,
    turn,
)

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


@given(LENGTHS)
def test_every_sample_is_in_exactly_one_bin_that_holds_it(lengths):
    bins = best_fit_decreasing(lengths, capacity=100)
    assert sorted(chain(*bins)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= 100 for members in bins)


@given(LENGTHS)
def test_no_two_bins_could_be_one(lengths):
    fills = [sum(lengths[i] for i in b) for b in best_fit_decreasing(lengths, capacity=100)]
    assert all(a + b > 100 for k, a in enumerate(fills) for b in fills[:k])


@given(LENGTHS)
def test_bins_are_within_the_known_bound_of_the_optimum(lengths):
    """Best-fit decreasing needs at most 11/9 of the optimum plus 6/9 (Dosa et al., 2013)."""
    least = -(-sum(lengths) // 100)
    halves = sum(length > 50 for length in lengths)
    bins = best_fit_decreasing(lengths, capacity=100)
    assert len(bins) >= max(least, halves)
    # The optimum itself is unknown, so the bound is checked where every item is small: there each
    # bin but one is filled beyond 100 - (the largest item).
    largest = max(lengths, default=0)
    fills = sorted(sum(lengths[i] for i in members) for members in bins)
    assert all(fill > 100 - largest for fill in fills[1:])


def test_longest_first_into_the_tightest_bin():
    #                              0   1   2   3   4
    assert best_fit_decreasing([50, 70, 30, 45, 5], capacity=100) == [[0, 3, 4], [1, 2]]


def test_bins_come_in_order_of_their_oldest_sample():
    bins = best_fit_decreasing([10, 90, 20, 80, 100], capacity=100)
    assert [members[0] for members in bins] == sorted(members[0] for members in bins)


@pytest.mark.parametrize("length", [0, -1, 101])
def test_a_length_that_fits_no_bin_is_named(length):
    with pytest.raises(ValueError, match=rf"lengths\[1\]={length} must lie in \[1, 100\]"):
        best_fit_decreasing([5, length], capacity=100)


FEW = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@given(FEW)
def test_no_choice_with_the_first_sample_is_much_fuller(lengths):
    chosen = full_with_first(lengths, capacity=60)
    others = range(1, len(lengths))
    choices = chain.from_iterable(combinations(others, n) for n in range(len(lengths)))
    sums = (lengths[0] + sum(lengths[i] for i in choice) for choice in choices)
    assert sum(lengths[i] for i in chosen) == max(total for total in sums if total <= 60)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))


def test_a_pack_holds_as_many_samples_as_fit():
    """However many of them: 2,000 of one token, or of one and of three."""
    assert full_with_first([1] * 3000, capacity=2000) == list(range(2000))
    lengths = [1, 3] * 1000
    chosen = full_with_first(lengths, capacity=2000)
    assert sum(lengths[i] for i in chosen) == 2000


@given(st.lists(st.sampled_from([1, 2, 3, 40]), min_size=3, max_size=9), st.integers(1, 40))
def test_a_stream_of_samples_becomes_full_packs_without_a_loss(lengths, buffer):
    """The last ones wait; less than a pack of them, or than `buffer` of them."""
    packs = full_packs(enumerate(cycle(lengths)), length=itemgetter(1), capacity=60, buffer=buffer)
    made = [pack for _, pack in zip(range(50), packs, strict=False)]
    assert all(sum(n for _, n in pack) <= 60 for pack in made)
    taken = sorted(number for pack in made for number, _ in pack)
    assert taken == sorted(set(taken))
    late = [i for i in range(taken[-1]) if i not in set(taken)]
    assert len(late) < buffer or sum(lengths[i % len(lengths)] for i in late) < 60 + 40


def test_mean_fill_of_packs_that_are_easy_to_count():
    assert mean_fill({16: 1}, capacity=15_360, buffer=100) == 1
    assert mean_fill({9_000: 1}, capacity=15_360, buffer=100) == pytest.approx(9 / 15.36)
    # Long ones are alone, and short ones in pairs: 40 + 28 tokens in a pack and a half.
    half = mean_fill({40: 2.5, 28: 2.5}, capacity=64, buffer=16)
    assert half == pytest.approx(68 / 96, rel=0.003)
    even = mean_fill({16: 1, 30: 1}, capacity=64, buffer=16, cost=float)
    assert 0.9 < even <= 1


def test_long_samples_go_before_short_ones_and_old_before_young():
    assert full_with_first([40, 10, 20, 30, 60, 10, 60], capacity=100) == [0, 4]
    assert full_with_first([48, 16, 16, 32], capacity=96) == [0, 1, 3]


def test_of_packs_that_are_almost_as_full_the_one_with_long_samples():
    assert full_with_first([500, 250, 250, 495], capacity=1000) == [0, 3]
    assert full_with_first([500, 250, 250, 485], capacity=1000) == [0, 1, 2]


def test_lengths_without_a_common_divisor():
    assert full_with_first([7, 13, 5, 90], capacity=100) == [0, 3]


@pytest.mark.parametrize("length", [0, -1, 101])
def test_a_length_that_fits_no_pack_is_named(length):
    with pytest.raises(ValueError, match=rf"lengths\[1\]={length} must lie in \[1, 100\]"):
        full_with_first([5, length], capacity=100)


@given(st.lists(st.sampled_from([1, 3, 7, 20, 55, 64]), min_size=200, max_size=400))
def test_nobody_waits_for_ever(lengths):
    """Each pack takes the oldest along, so all go in the end, and with 30 others at most."""
    waiting, arrivals, order = [], list(enumerate(lengths)), []
    while arrivals or waiting:
        while arrivals and len(waiting) < 30:
            waiting.append(arrivals.pop(0))
        chosen = full_with_first([length for _, length in waiting], capacity=64)
        assert chosen[0] == 0
        order += [waiting[i][0] for i in chosen]
        waiting = [item for i, item in enumerate(waiting) if i not in chosen]
    assert sorted(order) == list(range(len(lengths)))


def test_every_place_comes_once_in_a_cycle_of_turns():
    turns = [turn(n, packs=32, seed=1) for n in range(200)]
    assert [t.waiting for t in turns[:3]] == [8, 9, 10]
    assert all(0 <= t.place < t.waiting for t in turns)
    for first in (32, 64, 96):
        assert sorted(t.place for t in turns[first : first + 32]) == list(range(32))
    assert turns[32:64] != turns[64:96]
    assert turns != [turn(n, packs=32, seed=2) for n in range(200)]


def at_like_cost(lengths, *, capacity):
    return full_at_like_cost(lengths, [n * (1000.0 + n) for n in lengths], capacity=capacity)


@given(FEW)
def test_a_pack_of_like_cost_is_about_as_full(lengths):
    chosen = at_like_cost(lengths, capacity=600)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    full = sum(lengths[i] for i in full_with_first(lengths, capacity=600))
    assert full - 6 <= sum(lengths[i] for i in chosen) <= 600


def test_samples_alike_leave_in_their_order():
    assert at_like_cost([16] * 20, capacity=100) == [0, 1, 2, 3, 4, 5]
    assert at_like_cost([60, 20, 20, 20, 20, 60, 20, 20], capacity=100)[:3] == [0, 1, 2]


def test_each_pack_is_a_small_copy_of_the_samples():
    """Two long, or none at all, fill a pack as well as one."""
    lengths = [400, 400, 400, *[100] * 12]
    assert len(full_with_first(lengths, capacity=800)) == 2
    for order in (lengths, lengths[::-1]):
        chosen = at_like_cost(order, capacity=800)
        assert sorted(order[i] for i in chosen) == [100, 100, 100, 100, 400]


def test_what_costs_more_than_others_can_is_filled_with_the_cheapest():
    lengths = [900, 500, 10, 250, *[10] * 10, *[100] * 60]
    costs = [n * (10.0 + n) for n in lengths]
    chosen = full_at_like_cost(lengths, costs, capacity=1000)
    assert [lengths[i] for i in chosen] == [900, *[10] * 10]


def test_lengths_without_a_common_divisor_fill_a_pack_of_like_cost():
    lengths = [7919, 10007, 12007, *[4001, 4003, 4007, 2503, 2011, 997, 499, 251] * 6]
    chosen = at_like_cost(lengths, capacity=32768)
    assert 32768 * 0.99 <= sum(lengths[i] for i in chosen) <= 32768


@pytest.mark.parametrize("length", [0, -1, 101])
def test_a_length_that_fits_no_pack_of_like_cost_is_named(length):
    with pytest.raises(ValueError, match=rf"lengths\[1\]={length} must lie in \[1, 100\]"):
        at_like_cost([5, length], capacity=100)


def test_the_next_pack_costs_what_recent_ones_cost_at_its_quantile():
    recent = [float(n) for n in range(101, 200)]
    assert nearest_in_cost([190.0, 110.0, 150.0, 151.0], recent, quantile=0.5) == 2
    # what waits draws it to its own quantile: 0.8 * 150 + 0.2 * 190
    waiting = [190.0, 110.0, 190.0, 158.0, 190.0, 190.0, 145.0]
    assert nearest_in_cost(waiting, recent, quantile=0.5) == 3
    # of packs within 0.2% the oldest
    assert nearest_in_cost([150.2, 150.0, 150.0], recent, quantile=0.5) == 0
    assert nearest_in_cost([150.8, 150.0, 150.0], recent, quantile=0.5) == 1
