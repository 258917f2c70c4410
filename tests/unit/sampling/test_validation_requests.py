"""Which held-out samples lend a round of samples their captions."""

from __future__ import annotations

from dit.sampling.validation.requests import round_robin


def test_every_caption_comes_once_before_any_is_repeated():
    captions = ["one", "one", "two", "one", "three", "two"]
    samples = [((i // 4, i % 4), f"key {i}", caption) for i, caption in enumerate(captions)]
    order = round_robin(reversed(samples))
    assert [captions[4 * pack + index] for pack, index in order] == [
        *("one", "two", "three"),
        *("one", "two"),
        "one",
    ]
    assert sorted(order) == [spot for spot, _, _ in samples]


def test_a_sample_that_is_read_again_counts_once():
    samples = [((0, 0), "a", "cat"), ((0, 1), "b", "cat"), ((1, 0), "a", "cat")]
    assert round_robin(samples) == [(0, 0), (0, 1)]
