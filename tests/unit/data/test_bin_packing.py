from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit.data.pack import best_fit_decreasing, full_with_first, turn

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
