"""The judge of edits: right are the given digit and the told edit, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from data_prep.cli.parser import main as data_prep
from data_prep.sources import digits as packed
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from dit.sampling.commands.digit_accuracy import check_arguments, digits_parser
from dit.sampling.commands.edited_digit_accuracy import (
    EDITS,
    Asked,
    after_edits,
    conclude,
    find_nearest,
    held_out_digits,
    prompts_of,
    score,
    wanted,
)

DIGITS = load_digits().images[:180]
ASKED = wanted(DIGITS, seed=0)


def pictures(levels_NHW: np.ndarray) -> list[np.ndarray]:
    """Grey levels as a generator would return them: uint8 [1, H, W, 3]."""
    bytes_NHW = np.round(levels_NHW.clip(0, 16) * (255 / 16)).astype(np.uint8)
    return [np.repeat(one[None, :, :, None], 3, axis=-1) for one in bytes_NHW]


def part_right(levels_NHW: np.ndarray) -> float:
    return score(ASKED, find_nearest(pictures(levels_NHW), ASKED, DIGITS))["right"]


def test_edits_are_those_that_were_packed() -> None:
    assert packed.EDITS == EDITS
    source = packed.EditedDigits(num_samples=20)
    states_KEHW = after_edits(DIGITS[:20])
    for number, entry in enumerate(source.entries):
        levels_HW = (source.read(entry).video_CFHW[0, 0] + 1) * 8
        wanted_HW = states_KEHW[number // 2, 1 + EDITS.index(entry.caption)]
        np.testing.assert_array_equal(levels_HW, wanted_HW)


def test_what_was_asked_for_is_right_and_nothing_else() -> None:
    states_KEHW = after_edits(DIGITS)
    digit_N, edit_N = (np.array([getattr(a, name) for a in ASKED]) for name in ("digit", "edit"))
    real_NHW = states_KEHW[digit_N, edit_N + 1]
    assert part_right(real_NHW) == 1
    noise_NHW = np.random.default_rng(0).normal(size=real_NHW.shape)
    assert part_right(real_NHW + noise_NHW) > 0.97  # one level of 16 is little
    assert part_right(real_NHW * 0 + 8 + 4 * noise_NHW) < 0.05
    # The digit as it was, the other edit, and the edit of another digit.
    assert part_right(states_KEHW[digit_N, 0]) == 0
    assert part_right(states_KEHW[digit_N, 2 - edit_N]) == 0
    assert part_right(states_KEHW[(digit_N + 1) % len(DIGITS), edit_N + 1]) == 0


def test_score_tells_the_edits_apart() -> None:
    asked = [Asked(digit=k, edit=e) for k, e in ((0, 0), (1, 0), (2, 1), (3, 1))]
    states_KEHW = after_edits(DIGITS)
    made = [states_KEHW[0, 1], states_KEHW[1, 0], states_KEHW[2, 2], states_KEHW[3, 2]]
    report = score(asked, find_nearest(pictures(np.stack(made)), asked, DIGITS))
    assert report["edits"] == {"with a frame": 0.5, "mirrored": 1.0} and report["right"] == 0.75
    assert report["found"] == [[1, 1, 0], [0, 0, 2]]
    off = np.sqrt(np.square(states_KEHW[1, 0] - states_KEHW[1, 1]).mean()) / 4
    assert report["distance"] == pytest.approx(off, abs=0.02)  # of one in four; 255 levels are 16


def test_given_are_held_out_digits(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    words = ["digits", "--num_samples", "40", "--edits", "--output_dir", str(folder)]
    assert data_prep(words) == 0
    digits_KHW = held_out_digits(folder, vae.codec_of_card(read_card(folder)))
    assert 0 < len(digits_KHW) < 20
    assert all(np.abs(DIGITS[:40] - one).max((1, 2)).min() < 0.04 for one in digits_KHW)
    asked = wanted(digits_KHW, seed=1)
    assert len(asked) == 2 * len(digits_KHW) and asked != wanted(digits_KHW, seed=2)
    for one, prompt in zip(asked, prompts_of(asked, digits_KHW, tmp_path), strict=True):
        (file,) = prompt.references
        shown_HW = np.asarray(Image.open(file))[..., 0] * (16 / 255)
        assert prompt.text == EDITS[one.edit]
        np.testing.assert_allclose(shown_HW, digits_KHW[one.digit], atol=0.04)
    with pytest.raises(ValueError, match="has no mirrored digits; give the folder"):
        held_out_digits(tmp_path / "none", vae.codec_of_card(read_card(folder)))


@pytest.mark.parametrize(("right", "exit_code"), [(0.90, 0), (0.89, 1)])
def test_exit_code_follows_the_part_that_is_right(
    right: float, exit_code: int, tmp_path: Path
) -> None:
    words = ["--checkpoint_path", str(tmp_path / "LATEST"), "--edits"]
    parser = digits_parser()
    parser.set_defaults(min_accuracy=None)
    args = parser.parse_args(words)
    report = score(ASKED[:20], find_nearest(pictures(DIGITS[:20]), ASKED[:20], DIGITS))
    pairs = [(EDITS[0], np.zeros((8, 16, 3), np.uint8))]
    assert conclude(report | {"right": right, "unedited": 0.0}, pairs, args) == exit_code
    assert json.loads((tmp_path / "evaluation.json").read_text())["right"] == right
    assert (tmp_path / "pairs.png").is_file()
    with pytest.raises(ValueError, match="--edits and --inverted exclude each other"):
        check_arguments(parser.parse_args([*words, "--inverted"]))
