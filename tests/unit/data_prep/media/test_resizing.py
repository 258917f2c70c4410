"""Sizes: never a pixel short, never over the budget, tall and wide alike."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.media.resizing import (
    PRESETS,
    Buckets,
    ResizeMode,
    aspect_buckets,
    cover,
    spaced_ratios,
)
from data_prep.refusals import PrepError

SIDES = st.integers(1, 5000)


@settings(deadline=None)
@given(width=SIDES, height=SIDES, wide=st.integers(1, 300), high=st.integers(1, 300))
def test_a_scaled_picture_covers_its_bucket_by_less_than_a_pixel(
    width: int, height: int, wide: int, high: int
) -> None:
    scaled = cover(width, height, (wide, high))
    assert scaled[0] >= wide and scaled[1] >= high
    assert scaled[0] == wide or scaled[1] == high
    scale = max(wide / width, high / height)
    assert abs(scaled[0] - max(wide, width * scale)) <= 0.5 + 1e-6
    assert abs(scaled[1] - max(high, height * scale)) <= 0.5 + 1e-6


def test_the_case_that_truncation_gets_wrong() -> None:
    assert cover(607, 1102, (384, 672)) == (384, 697)


@pytest.mark.parametrize("multiple", [8, 16, 32, 64])
@pytest.mark.parametrize("preset", PRESETS)
def test_buckets_are_symmetric_and_within_the_budget(preset: str, multiple: int) -> None:
    budget = PRESETS[preset]
    sizes = aspect_buckets(budget=budget, multiple=multiple)
    assert {(h, w) for w, h in sizes} == set(sizes) and len(sizes) > 4
    side = math.isqrt(budget)
    assert (side, side) in sizes
    for wide, high in sizes:
        assert wide % multiple == 0 == high % multiple and wide * high <= budget
        assert wide * high > (0.85 if multiple < 32 else 0.6) * budget


def test_the_buckets_of_512p() -> None:
    sizes = aspect_buckets(budget=PRESETS["512p"], multiple=16)
    wide = [size for size in sorted(sizes, key=lambda s: s[0] / s[1]) if size[0] >= size[1]]
    assert wide == [
        (512, 512), (560, 448), (576, 432), (624, 416), (640, 400), (640, 384), (672, 384),
        (704, 352), (768, 336),
    ]  # fmt: skip


def test_the_nearest_bucket_is_the_same_for_tall_and_wide() -> None:
    buckets = Buckets(sizes=aspect_buckets(budget=512**2, multiple=16))
    for width, height in ((640, 480), (1920, 1080), (500, 1000), (333, 777), (3000, 100)):
        size = buckets.place(width, height).size
        assert buckets.place(height, width).size == size[::-1]


@pytest.mark.parametrize("mode", ResizeMode)
def test_crop_and_stretch(mode: ResizeMode) -> None:
    picture = Image.linear_gradient("L").resize((200, 100))
    cropped = Buckets(sizes=((64, 64),)).place(200, 100)
    assert cropped.resized == (128, 64)
    assert cropped.apply(picture, mode.filter).size == (64, 64)
    stretched = Buckets(sizes=((64, 64),), center_crop=False).place(200, 100)
    assert stretched.resized == (64, 64)
    assert stretched.apply(picture, mode.filter).size == (64, 64)


def test_spaced_ratios() -> None:
    assert spaced_ratios(least=0.5, most=2, count=3) == pytest.approx((0.5, 1, 2))
    assert spaced_ratios(least=0.5, most=2, count=1) == pytest.approx((1,))
    with pytest.raises(PrepError, match="min_ar 2"):
        spaced_ratios(least=2, most=1, count=3)
    with pytest.raises(PrepError, match="--max_pixels 10"):
        aspect_buckets(budget=10, multiple=8)
