"""The study of few steps: its options, its table and its figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.digits.few_steps import CLIPS, CURVES, DIGITS, STUDENTS, _parse, draw, summary

FIGURES = {"accuracy": 1.0, "spread_ratio": 0.5, "distance": 8.0, "distance_of_teacher": 2.0}


def test_clips_have_defaults_of_their_own() -> None:
    digits, clips = _parse(["runs"]), _parse(["runs", "--clips"])
    assert digits.material is DIGITS and clips.material is CLIPS
    assert (digits.seeds, digits.per_prompt, digits.tuned) == ([1, 2, 3], 200, [50, 200])
    assert (clips.seeds, clips.students, clips.tuned) == ([1], ["opd_4"], [])
    assert _parse(["runs", "--clips", "--per_prompt", "5", "--seeds", "7"]).per_prompt == 5
    assert clips.opd_steps == digits.opd_steps


def test_the_table_of_clips_has_digits_and_directions() -> None:
    figures = {name: one for name, one in FIGURES.items() if name != "accuracy"}
    read = {"digit": 0.975, "direction": 1.0, "cpu_s": 2.0, "seed": 1}
    rows = [
        {"row": "teacher", "steps": 35} | read | figures,
        {"row": "opd_4", "steps": 4, "distance_ratio": 0.25} | read | figures,
    ]
    teacher, student = summary(rows)
    assert student["digit, %"] == "97.5" and student["direction, %"] == "100"
    assert "read, %" not in student and student["distance, of the undistilled"] == "0.25"
    assert teacher["distance, of the undistilled"] == ""


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
    assert known == set(STUDENTS) | {f"undistilled_{steps}" for steps in DIGITS.undistilled}
    rows = [
        {"row": name, "seed": seed, "steps": int(name.split("_")[1])} | FIGURES
        for name in known
        for seed in (1, 2)
    ]
    draw(rows, tmp_path / "study.png")
    assert 10_000 < (tmp_path / "study.png").stat().st_size < 60_000
    with pytest.raises(KeyError):
        draw([{"row": "opd_4", "seed": 1, "steps": 4}], tmp_path / "study.png")
