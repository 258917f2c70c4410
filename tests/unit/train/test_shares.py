"""Who writes which weight of a checkpoint."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dit.train.checkpoint.shares import Owner, WeightSize, assign


def bytes_of(sizes: list[WeightSize], places: list[Owner], *, ranks: tuple[int, int]) -> np.ndarray:
    found = np.zeros(ranks, dtype=int)
    for size, place in zip(sizes, places, strict=True):
        found[slice(None) if size.split else place.tensor, place.data] += size.bytes
    return found


@st.composite
def stages(draw: st.DrawFn) -> tuple[list[WeightSize], int, int]:
    tensor_ranks, data_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    holder = st.lists(st.integers(0, data_ranks - 1), max_size=3, unique=True)
    size = st.builds(WeightSize, st.integers(1, 5000), st.booleans(), holder)
    return draw(st.lists(size, min_size=1, max_size=40)), tensor_ranks, data_ranks


@given(stages())
def test_no_rank_gets_more_than_an_even_share_and_the_largest_weight(stage):
    sizes, tensor_ranks, data_ranks = stage
    places = assign(sizes, tensor_ranks=tensor_ranks, data_ranks=data_ranks)
    found = bytes_of(sizes, places, ranks=(tensor_ranks, data_ranks))
    assert found.sum() == sum(s.bytes * (tensor_ranks if s.split else 1) for s in sizes)
    assert found.max() <= found.mean() + max(size.bytes for size in sizes)


def test_a_weight_stays_where_it_is_updated_while_the_shares_are_even():
    sizes = [WeightSize(10, split=True, holders=(rank,)) for rank in (3, 1, 0, 2)]
    places = assign(sizes, tensor_ranks=2, data_ranks=4)
    assert [place.data for place in places] == [3, 1, 0, 2]


def test_a_rank_that_updates_all_of_it_shares_the_writing():
    sizes = [WeightSize(10, split=False, holders=(1,)) for _ in range(8)]
    places = assign(sizes, tensor_ranks=2, data_ranks=4)
    assert bytes_of(sizes, places, ranks=(2, 4)).tolist() == [[10] * 4] * 2
    # Those that fit into an even share stay, on each of the tensor ranks.
    assert sum(place.data == 1 for place in places) == 2
