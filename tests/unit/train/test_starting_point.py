"""Where a run starts: its own checkpoint, another's steps, another's weights, or nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from dit.config import CheckpointConfig
from dit.train.checkpoint import starting_point as module
from dit.train.checkpoint.starting_point import StartingPoint, starting_point

OWN, OTHER = Path("run/step_2"), Path("other/step_4")


@pytest.mark.parametrize(
    ("there", "keys", "wanted"),
    [
        ([], {}, StartingPoint()),
        (["run"], {}, StartingPoint(checkpoint=OWN, goes_on=True, own=True)),
        (
            ["run", "other"],
            {"load": "other"},
            StartingPoint(checkpoint=OWN, goes_on=True, own=True),
        ),
        (
            ["run", "other"],
            {"load": "other", "finetune": True},  # which began it
            StartingPoint(checkpoint=OWN, goes_on=True, own=True),
        ),
        (["other"], {"load": "other"}, StartingPoint(checkpoint=OTHER, goes_on=True)),
        (["other"], {"load": "other", "finetune": True}, StartingPoint(checkpoint=OTHER)),
        ([], {"load": "run"}, StartingPoint()),
        (["other"], {"save": None, "load": "other"}, StartingPoint(checkpoint=OTHER, goes_on=True)),
    ],
)
def test_a_run_starts_at_its_own_checkpoint_else_at_another(monkeypatch, there, keys, wanted):
    found = {Path("run"): OWN, Path("other"): OTHER}
    monkeypatch.setattr(
        module, "find_checkpoint", lambda path: found[path] if str(path) in there else None
    )
    point = starting_point(CheckpointConfig(**{"save": "run", **keys}))
    assert point == wanted
    assert point.continued == (wanted.checkpoint if wanted.goes_on else None)
