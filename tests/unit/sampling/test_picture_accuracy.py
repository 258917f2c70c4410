"""The judge of evaluate_pictures.py: ranks, even pixels, deviation and noise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dit.sampling.commands.picture_accuracy import (
    Pictures,
    conclude,
    draw_samples,
    errors_on,
    even_pixels,
    lines,
    parser,
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


def test_a_rare_size_is_right_by_chance_and_the_result_says_so() -> None:
    """Each of four has a size of its own; twenty share one, two of them a caption."""
    rare = [shade(n, (8, 8 + 8 * n)) for n in range(1, 5)]
    pictures = Pictures(
        pixels=[*rare, *[shade(n) for n in range(20)]], captions=[*"wxyz", *"aabcdefghijklmnopqrs"]
    )
    found = score([shade(255, one.shape[:2]) for one in rare], list("wxyz"), pictures)
    assert (found.first, found.first_by_chance, found.ten_by_chance) == (1, 1, 1)
    found = score([shade(0), shade(5)], ["a", "b"], pictures)
    assert found.first_by_chance == pytest.approx((2 / 20 + 1 / 20) / 2)
    neither = (10 / 20) * (9 / 19)  # of two is among the ten
    assert found.ten_by_chance == pytest.approx((1 - neither + 10 / 20) / 2)


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
    assert (clean.deviation, clean.white, clean.noise, clean.even) == (0, 0, 0, 1)
    assert lines(clean, guidance=2.5)[:2] == [
        "1 caption of training pictures, guidance 2.5",
        "right picture nearest among training pictures of its size (1 of all sizes): 100%"
        " (100% by chance)",
    ]


def test_drawn_captions_differ_as_far_as_they_can() -> None:
    captions = [f"caption {n % 7}" for n in range(40)]
    pictures = Pictures(pixels=[WHITE] * 40, captions=captions)
    drawn = draw_samples(pictures, count=10, seed=3)
    assert len(set(drawn)) == 10 and len({captions[n] for n in drawn[:7]}) == 7
    assert drawn == draw_samples(pictures, count=10, seed=3)
    assert drawn != draw_samples(pictures, count=10, seed=4)
    assert len(draw_samples(pictures, count=100, seed=0)) == 40


def corpus(count: int) -> Pictures:
    """Drawings: an even ground, half of them white, with a square of another colour."""
    random = np.random.default_rng(7)
    pixels = list[np.ndarray]()
    for number in range(count):
        picture = np.full((24, 24, 3), 255 if number % 2 else 128, np.uint8)
        row, column = random.integers(0, 16, 2)
        picture[row : row + 8, column : column + 8] = random.integers(0, 256, 3)
        pixels.append(picture)
    return Pictures(pixels=pixels, captions=[f"drawing {n}" for n in range(count)])


def concluded(folder: Path, made: list[np.ndarray], pictures: Pictures, *limits: str) -> Any:
    """Exit code and report of the command, where `made` are what the sampler made."""
    words = ["--checkpoint_path", "run", "--output_dir", str(folder), *limits]
    args = parser().parse_args(words)
    code = conclude(made, pictures.captions[: len(made)], pictures, args, guidance=2.5)
    return code, json.loads((folder / "evaluation.json").read_text())


def test_a_perfect_sampler_has_every_picture_right_and_clean(tmp_path: Path) -> None:
    pictures = corpus(30)
    code, found = concluded(tmp_path, list(pictures.pixels), pictures, "--min_first", "1")
    assert (code, found["first"], found["ten"], found["median_rank"]) == (0, 1, 1, 1)
    assert (found["deviation"], found["white"]) == (0, 0) and found["even"] > 0.3
    assert found["settings"]["guidance"] == 2.5 and found["pictures"][3]["rank"] == 1
    sheet = np.asarray(Image.open(tmp_path / "pairs.png"))
    times = 4  # a picture of 24 pixels is enlarged to 96, and stands above its like
    assert np.array_equal(sheet[:96:times, :96:times], pictures.pixels[0])
    assert np.array_equal(sheet[98:194:times, :96:times], pictures.pixels[0])
    assert np.array_equal(sheet[202:298:times, 98:194:times], pictures.pixels[21])


def test_noise_is_measured_as_what_it_is(tmp_path: Path) -> None:
    random, pictures = np.random.default_rng(1), corpus(30)
    grey = Pictures(pixels=pictures.pixels[::2], captions=pictures.captions[::2])
    made = [
        np.clip(one + random.normal(0, 25.5, one.shape), 0, 255).astype(np.uint8)
        for one in grey.pixels
    ]
    code, found = concluded(tmp_path, made, grey, "--max_deviation", "0.09")
    assert (code, found["first"]) == (1, 1)
    assert found["deviation"] == pytest.approx(0.1, rel=0.05)
    assert found["noise"] == pytest.approx(0.1, rel=0.05) and found["white"] is None


def test_exchanged_pictures_have_the_ranks_of_their_distances(tmp_path: Path) -> None:
    shades, names = [shade(5 * n) for n in range(30)], [f"level {n}" for n in range(30)]
    levels = Pictures(pixels=shades, captions=names)
    made = [levels.pixels[(n + 2) % 30] for n in range(30)]  # each two levels lighter
    code, found = concluded(tmp_path, made, levels, "--min_ten", "0.94")
    ranks = [one["rank"] for one in found["pictures"]]
    # Nearer than level n to level n + 2 are n + 1, n + 2 and n + 3.
    assert ranks[:27] == [4] * 27 and ranks[27] == 3
    assert ranks[28:] == [29, 30]  # the two darkest in place of the two lightest
    assert (code, found["first"], found["median_rank"]) == (1, 0, 4)
    assert found["ten"] == pytest.approx(28 / 30)
