"""The parts of the study that need no training; the page's command, made tiny, runs all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.cli import parser as data_prep
from examples.digits.distilled_digits import ARMS, LABELS, NEW, draw, fitted, inverted
from examples.digits.judges import MIDDLE, NAMES, DigitJudge, grey_levels


def test_guidance_that_is_left_is_that_of_the_prediction() -> None:
    u, v = torch.randn(2, 3, 40, 4, generator=torch.Generator().manual_seed(0))
    beside = v - u
    beside[:, :, :2], beside[:, :, 2:] = -beside[:, :, 2:], beside[:, :, :2].clone()
    for scale in (1.0, 2.5, 3.0):
        guided = torch.lerp(u, v, scale) + beside  # at right angles to v - u
        assert fitted([*guided], [*v], [*u]) == pytest.approx(scale, abs=1e-5)


def test_inverted_digits_are_dark_on_white_under_new_prompts(tmp_path: Path) -> None:
    words = ["--num_samples", "60", "--pooled_text", "--output_dir", str(tmp_path / "old")]
    assert data_prep.main(["digits", *words]) == 0
    found = [*inverted(tmp_path / "old")]
    assert 40 < len(found) < 60  # the held-out digits are not among them
    pictures = [255 - np.stack([picture_HW] * 3, -1)[None] for picture_HW, _ in found]
    assert all(grey_levels(255 - picture).mean() > MIDDLE for picture in pictures)
    read_N = DigitJudge.trained().read(pictures)
    asked_N = [NEW.index(caption) for _, caption in found]
    assert np.mean(read_N == asked_N) > 0.95 and len(NEW) == len(NAMES)


def test_the_figure_has_a_panel_for_each_figure(tmp_path: Path) -> None:
    values = {f"{name}_{step}": step / 2 for name in LABELS for step in (1, 2)}
    rows = [{"variant": arm, "seed": seed} | values for arm in ARMS for seed in ("1", "2", "mean")]
    draw(rows, (1, 2), tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size < 60_000
