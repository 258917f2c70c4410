"""Steps of a run as a terminal shows them."""

from __future__ import annotations

import io
import re

import pytest

from dit.console import Console
from dit.train.metrics import writers


@pytest.mark.parametrize("name", ["xterm", "dumb"])
def test_narrow_and_simple_terminals_show_steps_and_the_time_left(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns are usual, and too few for all values of a step; `dumb` moves no cursor."""
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        width=80,
        color_system=None,
        _environ={"TERM": name},
    )
    monkeypatch.setattr(writers, "Console", lambda **_: console)
    shown = writers.Terminal(total=12_000, start=0, every=10)
    values = {"loss": 0.5, "grad_norm": 1.5, "lr": 2e-3, "tokens_per_s": 4321.0, "pack_fill": 1.0}
    shown.busy("validating")
    if shown.bar is not None:
        shown.bar.refresh()
    for step in range(1, 41):
        shown.step(values | {"step": step, "refused": 3, "skipped_steps": 0})
    shown.close()
    assert ("validating" in file.getvalue()) == (name == "xterm")
    last = re.split(r"\r|\n|\x1b\[2K", file.getvalue().removesuffix("\x1b[?25h").strip())[-1]
    assert re.search(r"step +40/12000.* \d:\d\d:\d\d", last)
    assert "loss 0.5000" in last
    assert len(last) <= 80 or name == "dumb"
