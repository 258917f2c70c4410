"""What a report reads is whatever a disk holds: the rest of the page is there all the same."""

from __future__ import annotations

import io
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dit.report import figures
from dit.report.charts import Curve, chart
from dit.report.findings import findings
from dit.report.lengths import histogram
from dit.report.pictures import generated, slider
from dit.report.reading import ReportError, RunRecord, finite, read_runs, series_of
from dit.report.series import buckets, curves
from dit.watching import NotShown
from tests.hostile import damaged, json_bytes, mistaken, odd_numbers
from tests.unit.report.pages import Page, report, write_grids, write_run, write_samples


def test_pictures_that_are_none_are_named_and_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_grids(run, range(10, 61, 10))
    grids = sorted((run / "validation_generation").rglob("grid.png"))
    grids[0].write_bytes(grids[0].read_bytes()[:50])
    grids[1].write_bytes(b"")
    grids[2].unlink()
    os.mkfifo(grids[2])
    samples = write_samples(tmp_path / "samples")
    (samples / "0.png").write_bytes(b"no png")
    page = report(run, "--samples_dir", samples)
    steps = [int(value) for _, name, value in page.attributes if name == "data-step"]
    assert steps == [40, 50, 60]
    for file in (*grids[:3], samples / "0.png"):
        assert f"{file} cannot be shown and is left out" in page.text


def test_a_run_without_a_finite_loss_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=None, skipped=True, skipped_steps=7, steps=7)
    page = report(run)
    assert "no step has a finite loss" in page.text and "7 steps skipped" in page.text
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"loss": null', '"loss": NaN'))
    assert "no step has a finite loss" in report(run).text
    (run / "metrics.jsonl").write_text('{"step": 1}')
    assert "no step has a finite loss" in report(run).text


def test_one_damaged_line_costs_no_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=9)
    good = (run / "metrics.jsonl").read_bytes()
    for bad in (b"[" * 99_999, b'{"step": 1e400}', b'{"step": true}', b"\xff", b'"\\ud800"', b"7"):
        later = good.replace(b'"step": ', b'"step": 1')  # 11 to 19
        (run / "metrics.jsonl").write_bytes(good + bad + b"\n" + later)
        (found,) = read_runs([run])
        assert len(found.lines) == 18 and "line 10 (" in found.unreadable[0]
    (run / "metrics.jsonl").write_text(good.decode() + '{"step": 10, "x": "a\u2028b"}\n')
    (found,) = read_runs([run])
    assert len(found.lines) == 10 and not found.unreadable


def test_an_integer_that_no_float_holds_is_cut(tmp_path: Path) -> None:
    """JSON's integers have no end: such a number once ended the page with an OverflowError."""
    run = write_run(tmp_path / "run", steps=9)
    huge = [{"step": 10, name: sign * 10**400} for name in LINE for sign in (1, -1)]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(_lines([{**LINE, **one, "step": 10} for one in huge]))
    report(run)
    assert [finite(sign * 10**400) for sign in (1, -1)] == [finite(1e300), finite(-1e300)]


def _measured(run: Path) -> None:
    """All that the page says of a run, but its drawing."""
    try:
        (found,) = read_runs([run])
    except ReportError as error:
        assert str(run) in str(error) and len(str(error)) < 2_000
        return
    for rows in (
        figures.summary_table(found),
        figures.data(found),
        figures.environment_table(found),
    ):
        Page(figures.table([found.name], [rows]))
    json.dumps(findings(found), ensure_ascii=False).encode()
    for curve in curves(found).values():
        assert all(math.isfinite(number) for point in curve for number in point)
    Page(histogram(found, title="t"))


LINE = {
    "step": 3,
    "loss": 0.5,
    "refused": 2,
    "refused_too_long": 2,
    "skipped": False,
    "val_loss": 0.7,
    "consumed_samples": 12,
    "tokens_per_sample": [[16, 4], [256, 5]],
    "pack_fill": 0.5,
}


def _lines(documents: list) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in documents)


LINES = _lines([LINE | {"step": step} for step in range(4)])


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    run = write_run(tmp_path_factory.mktemp("hostile") / "run", steps=3)
    (run / "config.yaml").unlink()  # which takes its time to read
    return run


@given(
    damaged(LINES)
    | json_bytes(LINE)
    | st.lists(mistaken(LINE), max_size=3).map(lambda odd: _lines([*odd, LINE]))
)
def test_hostile_metrics(small_run: Path, content: bytes) -> None:
    (small_run / "metrics.jsonl").write_bytes(content)
    _measured(small_run)


CARD = {"step": 1, "processor": {"name": "pixel"}, "dataset": {"path": "x"}, "sizes": [1]}


FILES = ("environment.jsonl", "checkpoints/step_00000001/dataset_card.json")


@given(st.sampled_from(FILES), json_bytes(CARD))
def test_hostile_files_beside_the_metrics(small_run: Path, name: str, content: bytes) -> None:
    (small_run / "metrics.jsonl").write_bytes(LINES)
    file = small_run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    _measured(small_run)
    file.unlink()


@pytest.mark.parametrize(
    "content",
    [b"[" * 9_999, b"{a: " * 9_999, b"\x00", b"- a", b"7", b"dataset: {path: [1]}", b"a: *b"],
)
def test_settings_that_are_none_cost_no_curve(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run", steps=3)
    (run / "config.yaml").write_bytes(content)
    page = report(run)
    assert str(run / "config.yaml") in page.text and "first loss" in page.text


SAMPLES = [
    {"file": "0.png", "prompt": "a <b>", "seed": 1, "fps": 24.0},
    {"file": "1.mp4", "prompt": "b", "seed": 2},
]


@given(json_bytes(SAMPLES))
def test_hostile_lists_of_samples(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "samples.json").write_bytes(content)
    try:
        shown = generated(tmp_path, [])
    except ReportError as error:
        assert str(tmp_path / "samples.json") in str(error)
    else:
        Page(shown)
        assert "<img" not in shown


def _png() -> bytes:
    content = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(noise).save(content, "png")
    return content.getvalue()


PICTURE = _png()
EMPTY = RunRecord(
    name="r", folder=Path(), lines=[], settings={}, config=None, starts=[], card=None, unreadable=[]
)


@given(damaged(PICTURE) | st.binary(max_size=64))
def test_hostile_grids(tmp_path: Path, content: bytes) -> None:
    for step, written in ((1, content), (2, PICTURE)):
        folder = tmp_path / f"validation_generation/step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "grid.png").write_bytes(written)
    undrawn: list[NotShown] = []
    shown = Page(slider([replace(EMPTY, folder=tmp_path)], undrawn))
    steps = [int(value) for _, name, value in shown.attributes if name == "data-step"]
    assert steps == ([2] if undrawn else [1, 2])
    assert all(str(tmp_path) in one.what for one in undrawn)


@given(st.lists(odd_numbers | st.floats() | st.none() | st.booleans(), min_size=1, max_size=9))
def test_hostile_values_are_drawn_inside_the_chart(values: list) -> None:
    shown = series_of([{"step": step, "x": value} for step, value in enumerate(values)]).get("x")
    if not shown:
        return
    drawn = chart("t", [Curve(label="x", buckets=buckets(shown), colour=0)])
    assert not re.search(r'[dxy]="[^"]*(nan|inf)', drawn)
    for way in re.findall(r'class="line[^"]*" d="M([^"]*)"', drawn):
        for point in way.split("L"):
            x, y = map(float, point.split())
            assert 50 <= x <= 408 and 8 <= y <= 214
