"""Runs that are killed with everything they have started, at a moment of one's choice."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launching import ROOT, environment

GONE = 120
"""Seconds within which a run has reached the moment at which it is to be killed."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a run is killed: so many seconds after it first does that, at that step or later."""

    step: int  # steps that are done
    phase: str | None  # of tests/phases.py; None for any
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Killed:
    """Where a kill fell."""

    step: int
    phase: str
    saving: bool  # a checkpoint was under way

    @property
    def place(self) -> str:
        """step, save or validation; what happens beside a save counts as save."""
        if self.saving or self.phase in ("gather", "publish"):
            return "save"
        return "validation" if self.phase == "validation" else "step"


def kill(arguments: list[str], folder: Path, moment: Moment) -> Killed | None:
    """Starts a run and kills it; None where the run was at its end before that.

    `arguments` are a command line of pretrain_dit.py, `folder` its checkpoint.save.
    """
    marks = folder.with_name(f"{folder.name}.phase")
    marks.unlink(missing_ok=True)
    script = arguments.index(str(ROOT / "recipes/pretrain_dit.py"))
    watched = [str(ROOT / "tests/phases.py"), str(marks)]
    with subprocess.Popen(
        [*arguments[:script], *watched, *arguments[script + 1 :]],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            _wait(launcher, marks, moment)
        finally:
            _kill_all(launcher)
        said, _ = launcher.communicate()
    if launcher.returncode >= 0:
        assert launcher.returncode == 0, said
        return None
    step, phase = _mark(marks)
    saving = any((folder / "checkpoints").glob(".partial_step_*"))
    return Killed(step=step, phase=phase, saving=saving)


def _wait(launcher: subprocess.Popen[str], marks: Path, moment: Moment) -> None:
    end = time.monotonic() + GONE
    while launcher.poll() is None and time.monotonic() < end:
        step, phase = _mark(marks)
        if step >= moment.step and moment.phase in (None, phase):
            time.sleep(moment.seconds)
            return
        time.sleep(0.001)


def _mark(marks: Path) -> tuple[int, str]:
    if not marks.exists():
        return -1, ""
    step, phase = marks.read_text().split()
    return int(step), phase


def _kill_all(launcher: subprocess.Popen[str]) -> None:
    """The launcher first, so that it can do nothing about its processes; then they and theirs."""
    if launcher.poll() is not None:
        return
    started = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    for process in started:
        process.kill()
    _, alive = psutil.wait_procs(started, timeout=GONE)
    assert not alive, alive
