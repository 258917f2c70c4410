"""Losses that do not compare are said at the top of a report, and drawn apart."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from dit.config.objective import ObjectiveConfig
from dit.report.comparison import MEASURES, OTHERS, loss_groups, loss_note
from dit.report.reading import RunRecord, default_settings
from tests.unit.report.pages import report, write_run


def objective(run: Path, **values) -> Path:
    """The run with other settings of its objective."""
    file = run / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["objective"] |= values
    file.write_text(yaml.safe_dump(tree))
    return run


def test_losses_that_do_not_compare_are_drawn_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, val_fid=3.0, val_far_loss=1.0) for name in "abc"]
    objective(runs[1], p_mean=-1.2, p_std=0.9)
    page = report(*runs)
    said = page.text.split("Worth a look")[2].partition("Summary")[0]
    assert "objective.p_mean is 0.0 in a and c, -1.2 in b; objective.p_std is 1.0 in a" in said
    for title, label in (("loss", ": training"), ("loss", ": validation")):
        assert f"{title}, p_mean 0.0{label}" in page.text
        assert f"{title}, p_mean -1.2{label}" in page.text
    assert "other validation sets, p_mean -1.2" in page.text
    keys = [value for tag, name, value in page.attributes if (tag, name) == ("g", "data-key")]
    assert sorted(key for key in keys if key.startswith("loss, p_mean 0.0: training")) == [
        "loss, p_mean 0.0: training/a",
        "loss, p_mean 0.0: training/c",
    ]
    assert [key for key in keys if "fid" in key] == ["fid/a", "fid/b", "fid/c"]  # one chart
    colours = {v.split()[1] for t, n, v in page.attributes if (t, n) == ("g", "class")}
    assert colours == {"c0", "c1", "c2"}  # of the run, in every chart


def test_two_runs_keep_their_colours_apart_and_one_chart_else(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name) for name in ("a", "b"))
    together = report(first, second)
    assert "do not compare" not in together.text and "b training" in together.text
    objective(second, sigma_min=0.01, text_dropout=0.5)  # which no loss measures
    assert "do not compare" not in report(first, second).text
    objective(second, name="flow")
    page = report(first, second)
    assert "objective.name is edm in a, flow in b" in page.text
    keys = [value for tag, name, value in page.attributes if (tag, name) == ("g", "data-key")]
    assert "loss, name edm/a training" in keys and "loss, name flow/b training" in keys


def test_every_option_of_the_objective_counts_for_losses_or_does_not() -> None:
    """A new option stands in one of the two lists of comparison.py."""
    options = {one.name for one in fields(ObjectiveConfig)}
    options |= {key for key in MEASURES if key.startswith("distill.")}
    assert set(MEASURES) | OTHERS == options and not set(MEASURES) & OTHERS


FLOW = {"name": "flow"}
UNIFORM = {"name": "flow", "density": "uniform"}
OPD = FLOW | {"distill.method": "opd"}
DMD = FLOW | {"distill.method": "dmd"}
HUBER = {"loss": "huber"}


@pytest.mark.parametrize(
    ("ours", "theirs", "compare"),
    [
        ({}, {"p_mean": 1.0}, False),
        ({}, FLOW, False),
        (FLOW | {"p_mean": 1.0}, FLOW, True),  # of the other objective
        (FLOW | {"logit_mean": 1.0}, FLOW, False),
        (UNIFORM | {"logit_mean": 1.0}, UNIFORM, True),
        (FLOW | {"flow_shift": 3.0}, FLOW, False),
        (FLOW | {"time_shift_type": "linear"}, FLOW, False),
        (FLOW | {"max_shift": 1.0}, FLOW, True),
        (FLOW | {"level_range": [0.5, 1.0]}, FLOW, False),
        (FLOW | {"prediction": "x"}, FLOW, False),
        (HUBER, {}, False),
        ({"huber_c": 0.3}, {}, True),
        (HUBER | {"huber_c": 0.3}, HUBER, False),
        ({"loss_mean": "sample"}, {}, False),
        ({"sigma_max": 9.0, "text_dropout": 0.2}, {}, True),
        (OPD, FLOW, False),
        (OPD | {"distill.steps": 8}, OPD, False),
        (FLOW | {"distill.steps": 8}, FLOW, True),
        (DMD | {"distill.levels": [0.1, 0.9]}, DMD, False),
        (DMD | {"distill.student_sampler": "ode"}, DMD, False),
        (DMD | {"distill.rollout": "data"}, DMD, False),
        (OPD | {"distill.rollout": "data"}, OPD, True),
        (DMD | {"distill.critic_lr": 1e-3}, DMD, True),
    ],
)
def test_only_options_in_effect_count(ours: dict, theirs: dict, compare: bool) -> None:
    runs = [recorded("a", ours), recorded("b", theirs), recorded("c", ours)]
    assert (loss_note(runs) == "") is compare
    found = [group.runs for group in loss_groups(runs)]
    assert found == ([[0, 1, 2]] if compare else [[0, 2], [1]])


def recorded(name: str, changes: dict) -> RunRecord:
    named = {key if "." in key else f"objective.{key}": value for key, value in changes.items()}
    settings = default_settings() | named
    lists: dict = {"lines": [], "starts": [], "unreadable": []}
    return RunRecord(
        name=name, folder=Path(name), settings=settings, config=None, card=None, **lists
    )


def test_a_run_of_an_earlier_version_lacks_later_keys() -> None:
    runs = [recorded("a", FLOW), recorded("b", FLOW)]
    del runs[1].settings["objective.prediction"]
    assert loss_note(runs) == "" and len(loss_groups(runs)) == 1


def test_labels_are_as_short_as_they_can_be() -> None:
    runs = [recorded("a", {}), recorded("b", FLOW), recorded("c", FLOW | {"flow_shift": 3.0})]
    assert [group.label for group in loss_groups(runs)] == [
        "name edm",
        "name flow, flow_shift 1.0",
        "name flow, flow_shift 3.0",
    ]
