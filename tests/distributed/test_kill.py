"""A run that is killed at any moment and started again is the run that was never killed.

KILLS=20 kills twenty times, over all the ways to run; three times where it is not set.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.killing import Moment, kill
from tests.launching import ROOT, SMALL, command, numbers, run
from tests.stored import assert_same_stored

KILLS = int(os.environ.get("KILLS", "3"))
LAST = 12
STEPS = (f"train.train_iters={LAST}", "train.global_batch_size=2", "checkpoint.save_interval=4")
PASSES = ("objective.cfg_target=2", "objective.drift_weight=0.5")
"""Of adapters, whose steps have both passes without gradients."""
VALIDATION = ("train.eval_interval=4", "train.eval_iters=6")


@dataclass(frozen=True)
class Way:
    """A way to run."""

    nproc: int
    workers: int
    background: bool
    adapters: bool = False  # trained beside the weights of a finished run
    shares: bool = False  # weights in shares; those beside adapters in 8 bits

    @property
    def settings(self) -> tuple[str, ...]:
        background = str(self.background).lower()
        shared = "weights" if self.shares else "optimizer"
        narrow = ("lora.base_dtype=float8_e4m3",) if self.adapters and self.shares else ()
        return (
            f"dataset.num_workers={self.workers}",
            f"checkpoint.async_save={background}",
            f"ddp.sharding={shared}",
            *narrow,
        )


WAYS = [
    Way(1, 0, True), Way(2, 2, False, adapters=True, shares=True), Way(2, 2, False),
    Way(2, 0, True, shares=True), Way(1, 2, False), Way(2, 2, True), Way(1, 0, False),
    Way(1, 0, True, adapters=True), Way(2, 2, False, adapters=True), Way(1, 2, True),
    Way(2, 0, False),
]  # fmt: skip
"""Those that are killed first come first."""


def _kills(way: Way) -> int:
    """How many of the kills are this one's: two each, as far as they go; then what is left."""
    index, pairs = WAYS.index(way), min(KILLS, 2 * len(WAYS))
    more = KILLS - pairs
    own = min(max(pairs - 2 * index, 0), 2)
    return own + more // len(WAYS) + (index < more % len(WAYS))


def _command(data: Path, folder: Path, way: Way, base: Path | None = None) -> list[str]:
    config = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL, *STEPS, *VALIDATION)
    places = (f"dataset.path={data}", f"checkpoint.save={folder}")
    if base is not None:
        config += ("checkpoint.finetune=true", f"checkpoint.load={base}")
        config += ("lora.rank=3", "lora.dropout=0.1", *PASSES)
    whole = command("pretrain_dit.py", *config, *places, *way.settings, nproc=way.nproc)
    if way.nproc > 1:
        return whole
    return [sys.executable, *whole[whole.index(str(ROOT / "recipes/pretrain_dit.py")) :]]


def _moments(way: Way) -> list[Moment]:
    """In a save, a step, validation, or anywhere: each way has others, and so have three kills."""
    chance = random.Random(f"{way} {KILLS}")
    phases: list[str | None] = ["gather", "step", None, "validation"]
    moments = []
    for number in range(_kills(way)):
        phase = phases[(3 * WAYS.index(way) + number) % len(phases)]
        seconds = chance.uniform(0, 0.2 if phase is None else 0.02)
        moments.append(Moment(step=chance.randrange(LAST - 4), phase=phase, seconds=seconds))
    return moments


@pytest.fixture(scope="module")
def never_killed(digits, tmp_path_factory):
    """The run that is to be equalled; saves in the background change nothing in it."""
    done: dict[Way, Path] = {}

    def of(way: Way) -> Path:
        key = replace(way, background=False)
        if key not in done:
            folder = tmp_path_factory.mktemp("whole")
            _run(_command(digits, folder, key, base(way)))
            done[key] = folder
        return done[key]

    def base(way: Way) -> Path | None:
        """The run whose weights the adapters are trained beside."""
        return of(WAYS[0]) if way.adapters else None

    of.base = base
    return of


def _run(arguments: list[str]) -> None:
    done = run(arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", [way for way in WAYS if _kills(way)], ids=str)
def test_killed_run_equals_the_one_that_was_never_killed(digits, tmp_path, never_killed, way):
    folder = tmp_path / "run"
    arguments = _command(digits, folder, way, never_killed.base(way))
    whole = never_killed(way)
    for moment in _moments(way):
        where = kill(arguments, folder, moment)
        sys.stdout.write(f"{way}: killed in {where.place}: {where}\n" if where else "at its end\n")
    _run(arguments)
    assert numbers(folder) == numbers(whole)
    last = f"checkpoints/step_{LAST:08d}"
    assert_same_stored(folder / last, whole / last)
    assert not list(folder.glob("checkpoints/.*"))
