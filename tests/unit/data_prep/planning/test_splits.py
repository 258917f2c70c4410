"""Keys are unique and readable; a key alone decides the split."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re

from data_prep.planning.splits import Split, SplitFractions, key_of, position_of
from data_prep.refusals import PrepError


@settings(deadline=None)
@given(source=st.text(min_size=1, max_size=300))
def test_keys_are_what_tar_and_loaders_take(source: str) -> None:
    key, member = key_of(source), f"{key_of(source)}.safetensors"
    assert re.fullmatch(r"[A-Za-z0-9_-]+", key)
    assert len(member) <= 100  # longer names need a second header
    assert split_name_re.match(member).groups() == (key, "safetensors")
    assert not skip_meta_re.match(member)


@settings(deadline=None)
@given(sources=st.sets(st.text(min_size=1, max_size=20), min_size=2, max_size=20))
def test_different_files_have_different_keys(sources: set[str]) -> None:
    assert len({key_of(source) for source in sources}) == len(sources)


def test_same_name_elsewhere_or_with_another_ending_is_another_key() -> None:
    same = ["a/0001.png", "b/0001.png", "a/0001.jpg", "a_0001.png", "a/0001_png", "a 0001.png"]
    assert len({key_of(source) for source in same}) == len(same)
    assert key_of("cats/old cat.png").startswith("cats_old_cat_png-")


def test_keys_and_splits_never_change() -> None:
    # Pinned: a change would move samples of an existing dataset between train and val.
    assert key_of("cats/old cat.png") == "cats_old_cat_png-59204cff0818"
    assert position_of("cats_old_cat_png-59204cff0818") == 0.6235714515218689


def test_positions_are_even() -> None:
    positions = [position_of(f"digits-{index:04d}") for index in range(4000)]
    for edge in (0.1, 0.5, 0.9):
        assert abs(sum(position < edge for position in positions) / 4000 - edge) < 0.03
    assert min(positions) >= 0 and max(positions) < 1


@pytest.mark.parametrize("text", ["1,0,0", "0,1,0", "0.8,0.1,0.1", "0.7,0.2,0.1", "0,0.5,0.5"])
def test_only_wanted_splits_get_samples(text: str) -> None:
    fractions = SplitFractions.parse(text)
    found = {fractions.split_of(str(index)) for index in range(500)}
    assert found == set(fractions.wanted)
    assert set(fractions.wanted) == {
        split for split, part in zip(Split, text.split(","), strict=True) if float(part) > 0
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.9,0.2,0", "sums to 1.1; .* must sum to 1"),
        ("0.5,0.1,0", "sums to 0.6"),
        ("1.5,-0.5,0", r"must lie in \[0, 1\]"),
        ("nan,0,1", r"must lie in \[0, 1\]"),
        ("0.9,0.1", "three fractions"),
        ("train", "three fractions"),
        ("0.9,0.1,0,0", "three fractions"),
    ],
)
def test_impossible_splits_are_errors(text: str, message: str) -> None:
    with pytest.raises(PrepError, match=message):
        SplitFractions.parse(text)


def test_a_wanted_split_without_samples_is_an_error() -> None:
    fractions = SplitFractions.parse("0.999,0.001,0")
    with pytest.raises(PrepError, match=r"0.001 of the samples in val, but none of the 3 .*1,0,0"):
        fractions.check_found(Counter({Split.TRAIN: 3}))
    SplitFractions.parse("1,0,0").check_found(Counter({Split.TRAIN: 1}))
