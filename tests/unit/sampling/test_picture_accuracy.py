"""The judge of evaluate_pictures.py: ranks, even pixels, deviation and noise."""

import numpy as np
import pytest

from dit.sampling.commands.picture_accuracy import (
    Pictures,
    draw_samples,
    errors_on,
    even_pixels,
    lines,
    right_one,
    score,
)

WHITE = np.full((8, 8, 3), 255, np.uint8)


def shade(level: int, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    return np.full((*size, 3), level, np.uint8)


def test_ranks_count_nearer_pictures_of_other_captions() -> None:
    levels = [0, 40, 80, 120, 160, 200]
    pictures = Pictures(pixels=[shade(n) for n in levels], captions=list("abcdea"))
    assert right_one(shade(42), "b", pictures) == (1, 0)
    assert right_one(shade(70), "b", pictures) == (1, 1)  # c is nearer
    assert right_one(shade(190), "a", pictures) == (5, 0)  # the nearest of its caption
    assert right_one(shade(255), "b", pictures) == (1, 4)  # c, d, e and the lighter a
    other = Pictures(pixels=[*pictures.pixels, shade(70, (8, 16))], captions=list("abcdeaz"))
    assert right_one(shade(70), "b", other) == (1, 1)  # another size is no match
    found = score([shade(42), shade(70), shade(255)], list("bbb"), pictures)
    assert (found.first, found.ten, found.median_rank) == (1 / 3, 1.0, 2.0)
    assert found.training_pictures == 6 and found.samples == 3


def test_even_pixels_have_a_square_of_one_colour_around_them() -> None:
    picture = WHITE.copy()
    picture[5, 6] = 0
    even = even_pixels(picture)
    assert even.shape == (8, 8)
    near = np.zeros((8, 8), bool)
    near[3:8, 4:9] = True  # within two pixels of the black one; the edge of the picture is none
    assert np.array_equal(even, ~near)
    picture[5, 6] = 253
    assert even_pixels(picture).all()  # two levels are no edge


def test_deviation_and_noise_of_known_errors() -> None:
    random, every = np.random.default_rng(0), np.ones((64, 64), bool)
    right = shade(128, (64, 64))
    shifted = errors_on(every, shade(153, (64, 64)), right)
    assert np.sqrt(shifted.mean(0)) == pytest.approx([25 / 255, 0])  # another colour, no noise
    noisy = np.clip(right + random.normal(0, 20, right.shape), 0, 255).astype(np.uint8)
    assert np.sqrt(errors_on(every, noisy, right).mean(0)) == pytest.approx(20 / 255, rel=0.05)
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None] * 3, right.shape)
    inside = np.zeros((64, 64), bool)
    inside[1:-1] = True
    assert errors_on(inside, ramp, right)[:, 1].max() < 1e-12  # a slope is no noise


def test_pictures_without_even_pixels_have_no_deviation() -> None:
    pixels = [np.random.default_rng(n).integers(0, 255, (8, 8, 3), np.uint8) for n in range(2)]
    found = score([pixels[0]], ["a"], Pictures(pixels=pixels, captions=["a", "b"]))
    assert (found.first, found.deviation, found.noise, found.even) == (1, None, None, 0)
    assert lines(found, guidance=1)[-1].startswith("no right picture")
    clean = score([WHITE], ["a"], Pictures(pixels=[WHITE], captions=["a"]))
    assert (clean.deviation, clean.noise, clean.even) == (0, 0, 1)
    assert lines(clean, guidance=2.5)[:2] == [
        "1 captions of training pictures, guidance 2.5",
        "right picture the nearest of 1 training pictures: 100%",
    ]


def test_drawn_captions_differ_as_far_as_they_can() -> None:
    captions = [f"caption {n % 7}" for n in range(40)]
    pictures = Pictures(pixels=[WHITE] * 40, captions=captions)
    drawn = draw_samples(pictures, count=10, seed=3)
    assert len(set(drawn)) == 10 and len({captions[n] for n in drawn[:7]}) == 7
    assert drawn == draw_samples(pictures, count=10, seed=3)
    assert drawn != draw_samples(pictures, count=10, seed=4)
    assert len(draw_samples(pictures, count=100, seed=0)) == 40
