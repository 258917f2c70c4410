"""Runs that are stopped, lose a process, their data or their disk: nothing hangs or is lost.

A run whose processes are signalled or killed starts as users start it, once for each way to end.
The others are forks with torch imported (`tests.warm_python`): each process costs seven seconds
less.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dit.safe_writing import LOCK
from tests.entering import Outcome
from tests.launching import ROOT, SMALL, command, environment, metrics, numbers, run
from tests.warm_python import warm_python

HANG = 60
"""Seconds within which every process of a broken run has to be gone."""


def _command(data: Path, folder: Path, *more: str, nproc: int = 2) -> list[str]:
    places = (f"dataset.path={data}", f"checkpoint.save={folder}", "train.eval_interval=0")
    config = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL)
    return command(
        "pretrain_dit.py", *config, *places, "train.global_batch_size=2", *more, nproc=nproc
    )


@contextmanager
def _running(
    arguments: list[str], folder: Path, *, warm: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A run without end that has saved its first checkpoint and goes on saving."""
    python = warm_python() if warm else arguments[0]
    with subprocess.Popen(
        [python, *arguments[1:], "train.train_iters=1000000", "checkpoint.save_interval=5"],
        env=environment() | {"PYTHON_EXEC": python},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            while launcher.poll() is None and not (folder / "checkpoints/LATEST").exists():
                time.sleep(0.1)
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.terminate()


def _end(launcher: subprocess.Popen[str]) -> Outcome:
    """What the processes of the run said; the launcher adds a traceback of its own."""
    said, wrong = launcher.communicate(timeout=HANG)
    assert launcher.returncode == 1, said + wrong
    return Outcome(1, said + wrong.partition("\nTraceback (most recent call last):")[0])


def _newest(folder: Path) -> int:
    return int((folder / "checkpoints/LATEST").read_text().removeprefix("step_"))


def _goes_on(arguments: list[str], folder: Path) -> None:
    """Started again, the run continues from its newest checkpoint."""
    newest = _newest(folder)
    done = run([*arguments, f"train.train_iters={newest + 1}"])
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {newest}" in done.stdout
    assert metrics(folder)[-1]["step"] == newest + 1


def _stop_launcher(launcher: subprocess.Popen[str]) -> None:
    """As a scheduler does; the launcher passes it on to all processes of the run, writers too."""
    launcher.terminate()


def _press_control_c(launcher: subprocess.Popen[str]) -> None:
    os.killpg(launcher.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "nproc", "tensor"), [(_stop_launcher, 1, 1), (_press_control_c, 2, 2)]
)  # with two tensor ranks, packs are under way
def test_stopped_run_has_saved_its_last_step(digits, tmp_path, stop, nproc, tensor):
    arguments = _command(
        digits, tmp_path, f"model.tensor_model_parallel_size={tensor}", nproc=nproc
    )
    with _running(arguments, tmp_path) as launcher:
        stop(launcher)
        said = _end(launcher).said
    assert "stopped on request; the same command continues" in said
    assert "error:" not in said
    assert _newest(tmp_path) == metrics(tmp_path)[-1]["step"]


def _trainers(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes of the run by their rank."""
    children = psutil.Process(launcher.pid).children()
    return {int(child.environ()["RANK"]): child for child in children}


def _holder(folder: Path) -> int:
    """The first process of the run, which holds the folder."""
    found = re.match(r"process (\d+) ", (folder / LOCK).read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_killed_process_is_named_and_the_run_goes_on_afterwards(digits, tmp_path):
    arguments = _command(digits, tmp_path)
    with _running(arguments, tmp_path) as launcher:
        rank = random.randrange(2)
        trainer = _trainers(launcher)[rank]
        family = psutil.Process(launcher.pid).children(recursive=True)
        trainer.kill()
        said = _end(launcher).error()
        assert not psutil.wait_procs(family, timeout=10)[1]
    assert f"rank {rank} (host {socket.gethostname()}, pid {trainer.pid}) died" in said
    assert "goes on from its last checkpoint" in said
    _goes_on(arguments, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_launcher_starts_the_run_again_by_itself(digits, tmp_path):
    """The first of two is killed; the numbers are those of an undisturbed run."""
    layout = ("model.tensor_model_parallel_size=2", "checkpoint.save_interval=3")
    settings = (*layout, "train.train_iters=15")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = run(_command(digits, whole, *settings, nproc=2))
    assert done.returncode == 0, done.stderr
    arguments = _command(digits, broken, *settings, nproc=2)
    arguments.insert(arguments.index("--standalone"), "--max-restarts=1")
    with subprocess.Popen(
        [warm_python(), *arguments[1:]],
        env=environment() | {"PYTHON_EXEC": warm_python()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        while launcher.poll() is None and not (broken / "checkpoints/LATEST").exists():
            time.sleep(0.05)
        first = _holder(broken)
        os.kill(first, signal.SIGKILL)
        said, wrong = launcher.communicate(timeout=4 * HANG)
    assert launcher.returncode == 0, said + wrong
    assert f"error: rank 0 (host {socket.gethostname()}, pid {first}" in wrong, wrong
    assert "continuing after step" in said
    assert numbers(broken) == numbers(whole)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])  # with two, the error comes up ahead of its step
def test_shards_that_vanish_end_the_run_and_it_goes_on_with_them_back(digits, tmp_path, tensor):
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(digits, data)
    arguments = _command(data, folder, f"model.tensor_model_parallel_size={tensor}")
    with _running(arguments, folder, warm=True) as launcher:
        (data / "train").rename(data / "moved")
        said = _end(launcher).error()
    assert "shard cannot be read" in said
    assert f"{data}/train/shard-000000.tar, key " in said
    assert "restore the shard" in said
    (data / "moved").rename(data / "train")
    _goes_on(arguments, folder)


@pytest.mark.slow
def test_checkpoint_that_does_not_fit_the_disk_costs_no_older_one(digits, tmp_path):
    arguments = _command(digits, tmp_path, "dataset.num_workers=0")
    assert run([*arguments, "train.train_iters=3"]).returncode == 0
    largest = max(f.stat().st_size for f in tmp_path.glob("checkpoints/*/*.distcp"))
    small = ["bash", "-c", f'ulimit -f {largest // 2048}; exec "$@"', "bash", warm_python()]
    full = run([*small, *arguments[1:], "train.train_iters=5"], env={"PYTHON_EXEC": warm_python()})
    said = Outcome(full.returncode, full.stderr.partition("Traceback")[0]).error()
    assert "step_00000005 cannot be written" in said
    assert "is the disk full? Free space, or choose another checkpoint.save" in said
    assert _newest(tmp_path) == 3
    _goes_on(arguments, tmp_path)


@pytest.mark.slow
def test_a_second_run_in_the_folder_ends_at_once_and_the_first_goes_on(digits, tmp_path):
    with _running(_command(digits, tmp_path, nproc=1), tmp_path, warm=True) as first:
        second = run(_command(digits, tmp_path, nproc=2), timeout=HANG)
        trainer = _holder(tmp_path)
        os.kill(trainer, signal.SIGKILL)
        _end(first)
    said = Outcome(second.returncode, second.stderr.partition("Traceback")[0]).error()
    assert f"checkpoint.save={tmp_path} is in use: process {trainer} on" in said
    newest, steps = _newest(tmp_path), [line["step"] for line in metrics(tmp_path)]
    assert newest >= 5 and steps == list(range(1, len(steps) + 1))
    _goes_on(_command(digits, tmp_path, nproc=1), tmp_path)
