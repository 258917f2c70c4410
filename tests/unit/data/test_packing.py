from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit.data.packing import best_fit_decreasing, ready_bins

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


def test_full_bins_and_that_of_the_oldest_are_ready():
    lengths = [10, 60, 40, 50]
    assert ready_bins([[0], [1, 2], [3]], lengths, enough=97) == [[0], [1, 2]]


@given(st.lists(st.sampled_from([1, 3, 7, 20, 55, 64]), min_size=200, max_size=400))
def test_waiting_samples_are_never_overtaken_for_ever(lengths):
    """The push-back loop on integers: each round the oldest goes, so all go in the end."""
    waiting, arrivals, given_out = [], list(enumerate(lengths)), []
    while arrivals or waiting:
        while arrivals and len(waiting) < 30:
            waiting.append(arrivals.pop(0))
        sizes = [length for _, length in waiting]
        bins = best_fit_decreasing(sizes, capacity=64)
        ready = bins if len(waiting) < 30 else ready_bins(bins, sizes, enough=62)
        taken = set(chain(*ready))
        assert 0 in taken
        given_out += [waiting[i][0] for i in sorted(taken)]
        waiting = [item for i, item in enumerate(waiting) if i not in taken]
    assert sorted(given_out) == list(range(len(lengths)))
