from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from data_prep.sources import digits as packed
from dit.sampling.commands.digit_accuracy import (
    CAPTIONS,
    LEVELS,
    SIDE,
    Judge,
    conclude,
    digits_parser,
    grey_levels,
    score,
    score_table,
    train_judge,
)


def test_digits_are_asked_for_as_they_were_packed() -> None:
    assert tuple(map(packed.caption_of, range(10))) == CAPTIONS
    assert (packed.SIDE, packed.LEVELS) == (SIDE, LEVELS)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return train_judge()


def pictures(images_NHW: np.ndarray, *, scale: int = 1) -> list[np.ndarray]:
    """Real digits as a generator would return them: uint8 [1, H, W, 3]."""
    large_NHW = images_NHW.repeat(scale, 1).repeat(scale, 2)
    bytes_NHW = np.round(large_NHW * (255 / 16)).astype(np.uint8)
    return [np.repeat(image[None, :, :, None], 3, axis=-1) for image in bytes_NHW]


def test_judge_is_right_on_digits_it_never_saw(judge: Judge) -> None:
    assert judge.held_out_accuracy > 0.98


@pytest.mark.parametrize("scale", [1, 4])
def test_real_digits_are_recognised(judge: Judge, scale: int) -> None:
    digits = load_digits()
    read = judge.read(pictures(digits.images[:500], scale=scale))
    assert score(asked=digits.target[:500], read=read).accuracy > 0.98


def test_shuffled_labels_are_right_one_time_in_ten(judge: Judge) -> None:
    digits = load_digits()
    asked = np.random.default_rng(0).permutation(digits.target)
    result = score(asked=asked, read=judge.read(pictures(digits.images)))
    assert 0.06 < result.accuracy < 0.14


def test_grey_levels_undo_the_picture() -> None:
    image_HW = load_digits().images[7]
    (picture,) = pictures(image_HW[None], scale=3)
    np.testing.assert_allclose(grey_levels(picture), image_HW.ravel(), atol=0.04)


def test_grey_levels_refuse_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="12x8 pixels"):
        grey_levels(np.zeros((1, 12, 8, 3), dtype=np.uint8))


def test_score_counts_every_picture_once() -> None:
    result = score(asked=[3, 3, 5], read=[3, 8, 5])
    assert result.asked[3] == 2 and result.right[3] == 1 and result.confused[3][8] == 1
    assert sum(map(sum, result.confused)) == 3
    assert result.accuracy == pytest.approx(2 / 3)
    assert score_table(result).row_count == len(CAPTIONS) + 1


@pytest.mark.parametrize(("right", "exit_code"), [(19, 0), (18, 1)])
def test_exit_code_follows_the_accuracy(
    judge: Judge, right: int, exit_code: int, tmp_path: Path
) -> None:
    args = digits_parser().parse_args(["--checkpoint_path", str(tmp_path / "LATEST")])
    result = score(asked=[1] * 20, read=[1] * right + [7] * (20 - right))
    assert conclude(result, judge, args) == exit_code
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["accuracy"] == right / 20
    assert written["settings"]["min_accuracy"] == 0.95
