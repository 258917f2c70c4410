"""The study of few steps: its table and its figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.digits.few_steps import CURVES, STUDENTS, UNDISTILLED, draw, summary

FIGURES = {"accuracy": 1.0, "spread_ratio": 0.5, "distance": 8.0, "distance_of_teacher": 2.0}


def test_the_table_has_means_and_ranges_of_the_seeds() -> None:
    rows = [
        {"row": "opd_4", "steps": 4, "seed": seed, "cpu_s": 10.0 * seed} | FIGURES
        for seed in (1, 2, 3)
    ]
    rows.append({"row": "undistilled_4", "steps": 4, "seed": 1, "cpu_s": None} | FIGURES)
    student, undistilled = summary(rows)
    assert student["seeds"] == "3" and student["CPU s"] == "20 (10 to 30)"
    assert student["spread, % of the teacher's"] == "50 (50 to 50)"
    assert undistilled["CPU s"] == "" and undistilled["distance"] == "8"


def test_the_figure_has_a_curve_for_each_method(tmp_path: Path) -> None:
    known = {name for names, _ in CURVES.values() for name in names}
    assert known == set(STUDENTS) | {f"undistilled_{steps}" for steps in UNDISTILLED}
    rows = [
        {"row": name, "seed": seed, "steps": int(name.split("_")[1])} | FIGURES
        for name in known
        for seed in (1, 2)
    ]
    draw(rows, tmp_path / "study.png")
    assert 10_000 < (tmp_path / "study.png").stat().st_size < 60_000
    with pytest.raises(KeyError):
        draw([{"row": "opd_4", "seed": 1, "steps": 4}], tmp_path / "study.png")
