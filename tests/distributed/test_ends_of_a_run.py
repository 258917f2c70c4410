"""Runs that are stopped, lose a process, their data or their disk: nothing hangs or is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.entering import Outcome
from tests.launching import ROOT, SMALL, command, environment, metrics, run

HANG = 60
"""Seconds within which every process of a broken run has to be gone."""


def _command(data: Path, folder: Path, *more: str, nproc: int = 2) -> list[str]:
    places = (f"dataset.path={data}", f"checkpoint.save={folder}", "train.eval_interval=0")
    config = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL)
    return command(
        "pretrain_dit.py", *config, *places, "train.global_batch_size=2", *more, nproc=nproc
    )


@contextmanager
def _running(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has saved its first checkpoint and goes on without end."""
    endless = ("train.train_iters=1000000", "checkpoint.save_interval=1000000")
    with subprocess.Popen(
        [*arguments, *endless[:1], "checkpoint.save_interval=5"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            while process.poll() is None and not (folder / "checkpoints/LATEST").exists():
                time.sleep(0.1)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> Outcome:
    said, wrong = process.communicate(timeout=HANG)
    assert process.returncode == 1, said + wrong  # the launcher's, whatever those of its processes
    return Outcome(1, said + wrong)


def _newest(folder: Path) -> int:
    return int((folder / "checkpoints/LATEST").read_text().removeprefix("step_"))


def _trainers(launcher: subprocess.Popen[str]) -> list[int]:
    threads = Path(f"/proc/{launcher.pid}/task").iterdir()
    return sorted(int(pid) for t in threads for pid in (t / "children").read_text().split())
