"""Programs that a study starts, one after another; a finished training is not repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start_python(*words: object) -> None:
    """Runs a program of this checkout with the arguments `words`, and waits for its end.

    Raises:
        ValueError: the program, which has printed its error, ended with an exit code other than 0.
    """
    program = os.environ.get("PYTHON_EXEC", sys.executable)  # as torch's launcher chooses it
    done = subprocess.run([program, *map(str, words)], cwd=ROOT)
    if done.returncode:
        said = f"{words[0]} ended with exit code {done.returncode}; its error stands above"
        raise ValueError(said)


def train_once(run: Path, config: Path, keys: Sequence[str]) -> None:
    """Trains `run` by `config` and the overrides `keys`, unless that was done.

    The CPU seconds of the training are stored in the folder of the run.
    """
    if (kept := run / "cpu_s.json").exists():
        return
    before = os.times().children_user
    words = ["--config-file", config, f"checkpoint.save={run}", *keys]
    start_python(ROOT / "recipes/pretrain_dit.py", *words)
    kept.write_text(json.dumps(os.times().children_user - before) + "\n")


def cpu_seconds(run: Path) -> float | None:
    """The CPU seconds that the training of `run` took; None if no study trained it."""
    kept = run / "cpu_s.json"
    return json.loads(kept.read_text()) if kept.exists() else None
