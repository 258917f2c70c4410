from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import dit.report
from dit.report.__main__ import main
from dit.report.charts import Axis, Curve, chart, number
from dit.report.findings import findings, spikes
from dit.report.reading import read_runs
from dit.report.series import buckets, chart_place, curves
from dit.sampling.grid import draw_grid
from tests.unit.report.pages import (
    Page,
    read_lines,
    report,
    write_grids,
    write_lines,
    write_run,
    write_samples,
)


def test_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_grids(run, range(40, 121, 40))
    page = report(run, "--samples_dir", write_samples(tmp_path / "samples"))
    sources = [value for _, name, value in page.attributes if name in {"src", "href"}]
    assert len([s for s in sources if s.startswith("data:image/png;base64,")]) == 3 + 3
    assert sum(s.startswith("data:video/mp4;base64,") for s in sources) == 1
    identities = {value for _, name, value in page.attributes if name == "id"}
    assert {s[1:] for s in sources if not s.startswith("data:")} == identities - {"live"}
    assert "url(" not in page.text and "@import" not in page.text
    assert ("meta", "name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in page.text


@pytest.mark.slow
def test_the_command_says_only_where_the_page_is(tmp_path: Path) -> None:
    """Megatron-Core, which counts the parameters, warns of packages that no user lacks."""
    command = [sys.executable, "-m", "dit.report", write_run(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"report  {(tmp_path / 'run' / 'report.html').resolve()}\n"


def test_page_says_what_came_out(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run"), "--samples_dir", write_samples(tmp_path / "samples"))
    for figure in ("120 of 20", "60.0 s", "1,440", "4321", "97.0%", "num_steps", "0.1004"):
        assert figure in page.text
    assert page.text.count("a <b> & c") == 1 and "two" in page.text
    assert "Worth a look" not in page.text


def test_runs_side_by_side_show_what_differs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run")
    second = write_run(tmp_path / "b" / "run", seed=77)
    page = report(first, second)
    differing = page.text.split("Settings that differ")[2].partition("All settings")[0]
    assert "rng.seed" in differing and "77" in differing and "train.train_iters" not in differing
    assert "a/run, b/run" in page.text


def test_one_run_shows_what_was_set(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", seed=77))
    shown = page.text.split("Settings that are not the default")[2].partition("All settings")[0]
    assert "rng.seed" in shown and "optimizer.clip_grad" not in shown


def test_slider_has_the_grid_of_every_step_up_to_a_bound(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_grids(run, range(1, 61))
    page = report(run)
    steps = [int(value) for _, name, value in page.attributes if name == "data-step"]
    assert len(steps) == 24 and steps[0] == 1 and steps[-1] == 60
    assert [value for tag, name, value in page.attributes if (tag, name) == ("input", "max")] == [
        "23"
    ]


def test_samples_with_and_without_the_adapter_are_shown(tmp_path: Path) -> None:
    """In one grid; where there is none, one before the other. Grey 40 and 80 are with it."""
    run = write_run(tmp_path / "run")
    write_grids(run, range(40, 81, 40))
    for step in (40, 80):
        bare = run / f"validation_generation/step_{step:08d}/without_adapter"
        bare.mkdir()
        Image.fromarray(np.full((8, 8, 3), step + 1, np.uint8)).save(bare / "00000.png")
    (bare.parent / "grid.png").unlink()
    tags = report(run).attributes
    said = [value for tag, name, value in tags if (tag, name) == ("img", "alt")]
    assert said == [
        "samples at step 40, without the adapter and with it",
        "samples at step 80, without the adapter",
        "samples at step 80",
    ]
    sources = [value for tag, name, value in tags if (tag, name) == ("img", "src")]
    assert [_grey(source) for source in sources] == [40, 81, 80]


def _grey(source: str) -> Any:
    content = base64.b64decode(source.partition(",")[2])
    return Image.open(io.BytesIO(content)).convert("L").getpixel((0, 0))


def test_a_grid_is_arranged_anew_with_whole_prompts(tmp_path: Path) -> None:
    """Each picture comes out of the grid as it was, above its prompt; those of one together."""
    run = write_run(tmp_path / "run")
    pictures = [np.full((24, 40, 3), 10 * n, np.uint8) for n in range(1, 6)]
    prompts = ["a fox", "a fox", "a long caption " * 20, "<b>", "a fox"]
    folder = run / "validation_generation/step_00000040"
    folder.mkdir(parents=True)
    draw_grid(pictures, prompts, folder / "grid.png", title="without | with")
    page = report(run)
    tags = page.attributes
    said = [value for tag, name, value in tags if (tag, name) == ("img", "alt")]
    assert said == ["a fox"] * 3 + ["a long caption " * 20, "<b>"]  # in the order of the grid
    sources = [value for tag, name, value in tags if (tag, name) == ("img", "src")]
    assert [_grey(source) for source in sources] == [10, 20, 50, 30, 40]
    counts = [value for tag, name, value in tags if (tag, name) == ("figure", "style")]
    assert [one.partition(";")[0] for one in counts] == [f"--count:{n}" for n in (3, 1, 1)]
    assert page.text.count("a fox") == 1 and "without | with" in page.text


@pytest.mark.parametrize(
    "named",
    ["", "{", "[]", '{"title": "", "cells": [{"prompt": "p", "box": [0, 0, 9, 9]}]}',
     '{"title": 1, "cells": []}', '{"title": "", "cells": [{"prompt": 3, "box": "left"}]}'],
)  # fmt: skip
def test_a_grid_that_names_no_places_is_shown_whole(tmp_path: Path, named: str) -> None:
    run = write_run(tmp_path / "run")
    write_grids(run, range(40, 41))
    (grid,) = (run / "validation_generation").rglob("grid.png")
    note = PngInfo()
    note.add_text("cells", named)
    Image.fromarray(np.full((8, 8, 3), 77, np.uint8)).save(grid, pnginfo=note)
    page = report(run)
    (source,) = (value for tag, name, value in page.attributes if (tag, name) == ("img", "src"))
    assert _grey(source) == 77 and "cannot be shown" not in page.text


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics.jsonl; name the folder"),
        (lambda run: run.rename(run.with_name("gone")), "does not exist; name the folder"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "has no finished step"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\x00{"), "line 1"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 0, "val_loss": 1}'),
            "no finished",
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, capsys, break_it, words: str) -> None:
    run = write_run(tmp_path / "run")
    break_it(run)
    assert main([str(run)]) == 1
    assert words in capsys.readouterr().err


def test_a_file_or_checkpoint_of_a_run_is_answered_with_the_run(tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path / "run", steps=2)
    (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    for inside in ("metrics.jsonl", "checkpoints/step_00000002"):
        assert main([str(run / inside)]) == 1
        said = capsys.readouterr().err
        assert "has no metrics.jsonl" in said and said.endswith(f"here {run}\n")


def test_a_run_named_twice_is_refused(tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path / "run")
    assert main([str(run), str(run / ".." / "run")]) == 1
    assert "is named 2 times" in capsys.readouterr().err


def test_samples_without_list_are_refused(tmp_path: Path, capsys) -> None:
    samples = write_samples(tmp_path / "samples")
    (samples / "samples.json").unlink()
    run = write_run(tmp_path / "run")
    assert main([str(run), "--samples_dir", str(samples)]) == 1
    assert "samples.json" in capsys.readouterr().err


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[6:6] = ['{"step": 7, "lo', "[]", '{"loss": 1}']
    lines.append(lines[-1])  # a step that is there twice counts once
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 121, "lo']))
    (run / "config.yaml").write_text("model: [")
    (run / "environment.jsonl").write_text("null\n")
    text = report(run).text
    for words in ("line 7 (", "line 8 (", "line 9 (it is not an object", "config.yaml is damaged"):
        assert words in text
    assert "environment.jsonl is damaged" in text and "120" in text
    assert "line 125" not in text  # it is being written
    assert "22.8k" in text  # 120 times 190 tokens


def test_a_run_of_another_version_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "config.yaml").open("a") as file:
        file.write("later:\n  knob: 3\n")
    text = report(run).text
    assert "is of another version" in text and "later.knob" in text


def test_findings_of_a_troubled_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", pack_fill=0.5, refused=3, refused_too_long=3)
    lines = read_lines(run)
    lines[80]["loss"] *= 9
    lines[90] |= {"loss": None, "skipped": True}
    lines[119]["val_loss"] = 2.0
    write_lines(run, lines)
    found = findings(read_runs([run])[0])
    fill, skipped, refused, jump, rise = found
    assert "50.0% full" in fill
    assert "1 step skipped" in skipped and "(91)" in skipped
    assert "3 samples refused, 3 too long" in refused
    assert "1 step (81)" in jump
    assert "above its lowest 0.123 at step 80" in rise


@pytest.mark.parametrize(
    ("fill", "multiple", "lengths", "named", "buffer"),
    [
        (0.25, 16, [[4, 90]], "so 75.0% of the packed tokens are padding", False),
        (0.15, 16, [[4, 90]], "so 75.0%", True),  # the rest is of another cause
        (0.50, 8, [[4, 30], [8, 60], [1024, 50]], None, True),  # long ones decide
        (0.30, 1, [[4, 90]], None, True),
        (0.30, 16, [], None, True),
    ],
)
def test_the_cause_of_a_low_fill_is_named(tmp_path, fill, multiple, lengths, named, buffer) -> None:
    run = write_run(tmp_path / "run", pack_fill=fill, tokens_per_sample=lengths)
    file = run / "config.yaml"
    text = re.sub(r"sample_multiple: \d+", f"sample_multiple: {multiple}", file.read_text())
    file.write_text(text)
    (found,) = findings(read_runs([run])[0])
    assert (f"dataset.sample_multiple={multiple}" in found) == (named is not None)
    assert (named or "") in found
    assert ("dataset.packing_buffer_size" in found) == buffer


def test_noise_is_no_spike() -> None:
    noise = np.random.default_rng(0).normal(1, 0.1, 3000)
    loss = [(step, float(value)) for step, value in enumerate(noise, start=1)]
    assert spikes(loss) == []
    assert spikes([*loss[:200], (201, 2.5), *loss[200:]]) == [201]


def test_every_metric_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", never_heard_of=3.5, skipped_steps=0)
    found = {(at.title, at.label) for at in curves(read_runs([run])[0])}
    assert ("never_heard_of", "never_heard_of") in found
    assert {("loss", "training"), ("loss", "validation")} <= found
    assert ("steps skipped so far", "skipped_steps") not in found  # always 0


def test_lengths_of_samples_are_added_up(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run(first, steps=3, tokens_per_sample=[[16, 4], [256, 5], [1024, 1]])
    write_run(second, steps=3)
    lines = read_lines(first)
    lines[1].pop("tokens_per_sample")
    write_lines(first, lines)
    page = report(first, second)
    assert "tokens of a sample, whole run: first" in page.text
    assert "whole run: second" not in page.text
    assert "of 20 samples 10% up to 16, 50% up to 256, 90% up to 256 tokens" in page.text
    heights = [float(v) for tag, name, v in page.attributes if (tag, name) == ("rect", "height")]
    assert heights == [pytest.approx(206 * part, abs=0.1) for part in (0.8, 1, 0.2)]


def test_metrics_find_their_chart() -> None:
    title = chart_place("val_far_loss_ema_q12.5").title
    assert title == "val_far_loss_ema by noise level (lowest q: least noise)"
    assert chart_place("val_loss_video8_32").label == "video8_32"
    assert chart_place("grad_norm_attention").label == "attention"
    assert chart_place("tokens_per_s").title == "tokens per second"
    assert chart_place("samples_per_s").title == "samples per second"
    assert chart_place("samples_cats-2.0").label == "cats-2.0"
    assert chart_place("epoch_cats").title == "epochs by dataset"
    assert chart_place("epoch").title == "epochs"
    assert chart_place("sampling_s").title == "seconds of a validation"
    assert chart_place("data_s").title == chart_place("step_time_s").title == "seconds of a step"


def test_buckets_keep_mean_and_extremes() -> None:
    values = np.random.default_rng(1).normal(size=1001)
    found = buckets([(i, float(v)) for i, v in enumerate(values)], most=50)
    assert len(found) <= 50
    assert min(b.low for b in found) == values.min() and max(b.high for b in found) == values.max()
    assert found[0].mean == pytest.approx(values[:21].mean())


@pytest.mark.parametrize(
    "values", [[0.0], [3.0] * 5, [1e-9, 1e9], [-2, 5], [1e6, 1.000001e6], [0, 0, 1e-30], [1e30, 1]]
)
def test_any_values_are_drawn_inside_the_chart(values: list[float]) -> None:
    line = Curve(label="x", buckets=buckets(list(enumerate(values))), colour=0)
    drawn = chart("t", [line])
    assert "nan" not in drawn and "inf" not in drawn
    path = re.search(r'class="line[^"]*" d="M([^"]*)"', drawn)
    for point in path[1].split("L") if path else ():
        x, y = map(float, point.split())
        assert 50 <= x <= 408 and 8 <= y <= 214


def test_ticks_lie_on_the_axis() -> None:
    for axis in (Axis(0, 7), Axis(0.31, 0.35), Axis(0.01, 50, log=True), Axis(0.3, 1.4, log=True)):
        ticks = axis.ticks()
        assert 2 <= len(ticks) <= 8
        assert all(0 <= axis.at(tick) <= 1 for tick in ticks)


def test_numbers_are_short() -> None:
    shown = [number(v) for v in (0.01234, 4.5, 2731, 12345, 4.5e6, 0)]
    assert shown == ["0.0123", "4.5", "2731", "12.3k", "4.5M", "0"]


def test_card_of_the_dataset_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    checkpoint = run / "checkpoints" / "step_00000020"
    checkpoint.mkdir(parents=True)
    (checkpoint / "dataset_card.json").write_text('{"processor": {"name": "pixel"}}')
    assert "card: processor.name" in report(run).text


def test_log_axes_are_marked_and_linear_ones_are_not() -> None:
    def drawn(title: str, values: list[float]) -> str:
        return chart(title, [Curve(label="x", buckets=buckets(list(enumerate(values))), colour=0)])

    assert "log scale" in drawn("loss", [9.0, 0.1])
    assert "log scale" not in drawn("loss", [2.0, 1.0])
    assert "log scale" not in drawn("learning rate", [9.0, 0.1])
    assert "log scale" not in drawn("steps skipped so far", [9.0, 0.1])


def test_values_that_differ_in_the_tenth_digit_have_labels_that_differ() -> None:
    values = list(enumerate([1.0, 1.0 + 1e-10]))
    drawn = chart("x", [Curve(label="x", buckets=buckets(values), colour=0)])
    assert "1.00000000005" in drawn


def _sections(page: Page) -> list[str]:
    return [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]


def test_many_runs_show_curves_before_samples(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{i}", steps=5) for i in range(10)]
    for run in runs:
        write_grids(run, range(1, 7))
        (run / "config.yaml").unlink()  # which takes its time to read
    many, one = report(*runs), report(runs[0])
    wanted = ("loss", "samples-over-the-steps", "data")
    assert [name for name in _sections(one) if name in wanted] == [*wanted]
    assert [name for name in _sections(many) if name in wanted] == [wanted[i] for i in (0, 2, 1)]
    assert sum(name == "data-step" for _, name, _ in many.attributes) == 10 * 6
    styles = {value for tag, name, value in many.attributes if (tag, name) == ("i", "class")}
    assert len(styles) >= 10  # ten runs are told apart


def test_white_grids_are_dimmed_by_night_and_others_are_not(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_grids(run, range(1, 4))
    grid = sorted((run / "validation_generation").rglob("grid.png"))[1]
    Image.fromarray(np.full((8, 8, 3), 255, np.uint8)).save(grid)
    page = report(run)
    papers = [value for tag, name, value in page.attributes if (tag, name) == ("img", "class")]
    assert papers == ["paper"]


def test_long_words_break_wherever_they_stand() -> None:
    """A word that does not break would scroll the whole page on a phone."""
    style = (Path(dit.report.__file__).parent / "page.html").read_text()
    (body,) = re.findall(r"^body {[^}]*}", style, re.MULTILINE)
    assert "overflow-wrap: anywhere" in body
    found = [rule for rule in style.splitlines() if re.search("wrap: (?!any)|nowrap", rule)]
    others = [rule.split()[0] for rule in found if "flex-wrap" not in rule]
    assert others == ["th"]  # which scrolls in a box of its own
