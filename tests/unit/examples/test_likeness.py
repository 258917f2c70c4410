"""Spread and distance of sets of digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.digits.accuracy import digits_parser
from examples.digits.judges import CAPTIONS, digits_of_judge
from examples.digits.kinds import MirroredKind, StillKind
from examples.digits.likeness import Components, figure_lines, spread


def still(each: int = 10) -> StillKind:
    flags = ("--checkpoint_path", "nowhere", "--per_prompt", str(each))
    return StillKind(digits_parser().parse_args(flags))


def pictures(levels_NP: np.ndarray) -> list[np.ndarray]:
    grey_NHW = (levels_NP.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)
    return [np.repeat(one[None, ..., None], 3, -1) for one in grey_NHW]


def test_of_gaussians_both_figures_are_the_closed_forms() -> None:
    """Two labels; along each component one deviation of 3 within a label, and one of 2."""
    generator = np.random.default_rng(0)
    deviations_P = np.where(np.arange(30) % 2, 3.0, 2.0)
    labels = [0, 1] * 20_000
    centre_N1 = np.array(labels)[:, None] * 10.0
    real_NP = generator.standard_normal((40_000, 30)) * deviations_P + centre_N1
    found = Components.of(real_NP, labels)
    own = found.figures(real_NP, labels)
    assert own["distance"] == pytest.approx(0, abs=1e-6)
    assert own["spread"] == own["spread_real"]
    # The first component is the one between the labels; then come those of deviation 3.
    assert own["spread"] == pytest.approx((15 * 9 + 4 * 4 + 6.5) / 20, rel=0.02)
    # Half as wide around their labels, and moved by 1 along each pixel.
    made_NP = (real_NP - centre_N1) / 2 + centre_N1 + 1
    wide_D = found.places(real_NP).std(0)
    away = found.figures(made_NP, labels)
    assert away["spread"] == pytest.approx(own["spread"] / 4, rel=1e-6)
    moved_D = found.places(made_NP).mean(0) - found.places(real_NP).mean(0)
    narrow_D = found.places(made_NP).std(0)
    expected = np.square(moved_D).sum() + np.square(wide_D - narrow_D).sum()
    assert away["distance"] == pytest.approx(float(expected), rel=0.01)
    of_teacher = found.figures(made_NP, labels, (real_NP, made_NP), labels)
    assert of_teacher["distance"] == pytest.approx(0, abs=1e-6)
    assert of_teacher["distance_of_teacher"] == pytest.approx(away["distance"])


def test_one_picture_of_each_digit_is_read_as_asked_and_has_no_spread() -> None:
    """What reading does not see."""
    train_NP, _, train_N, _ = digits_of_judge()
    each = [train_NP[train_N == digit][:10] for digit in range(10)]
    varied = pictures(np.concatenate(each))
    same = pictures(np.repeat([rows[0] for rows in each], 10, axis=0))
    kind = still()
    figures = [kind.likeness(made) for made in (varied, same)]
    assert min(kind.judged(made)["accuracy"] for made in (varied, same)) >= 0.99
    assert figures[0]["spread"] == pytest.approx(figures[0]["spread_real"], rel=0.2)
    assert figures[1]["spread"] == pytest.approx(0, abs=1e-12)
    assert figures[1]["distance"] > 3 * figures[0]["distance"] > 0


def test_a_teacher_takes_the_place_of_real_digits() -> None:
    train_NP, _, train_N, _ = digits_of_judge()
    rows = np.concatenate([np.flatnonzero(train_N == digit)[:20] for digit in range(10)])
    one, other = pictures(train_NP[rows]), pictures(15 - train_NP[rows].clip(0, 15))
    kind = still(20)
    assert [p.text for p in kind.teacher_prompts(None)].count(CAPTIONS[3]) == 200
    alike, away = kind.likeness(one, [one, one]), kind.likeness(one, [other, other])
    assert alike["distance"] == pytest.approx(0, abs=1e-6) and away["distance"] > 1
    assert alike["spread"] == pytest.approx(alike["spread_teacher"])
    (line,) = figure_lines(alike)
    assert "100% of that of the teacher's; distance to them" in line
    with pytest.raises(ValueError, match="--teacher compares digits and clips"):
        MirroredKind.__new__(MirroredKind).teacher_prompts(None)


def test_too_few_pictures_have_no_figures(tmp_path: Path) -> None:
    assert spread(np.zeros((2, 20)), ["a", "b"]) is None
    assert figure_lines({"spread": None, "distance": 1.0}) == []
