"""Compares training methods on small MLPerf data: when each reaches AdamW's loss.

All variants train conf/mlperf_digits.yaml, which says how to pack its digits.

    python examples/digits/mlperf_twin.py runs/mlperf_twin --cpu_seconds 90

1. train  each variant with each seed, one thread, as many steps as the CPU seconds buy
2. goal   the mean loss of the first variant at 80% of these CPU seconds
3. table  CPU seconds of training until the loss is at the goal, interpolated between validations

CPU seconds are the number of steps times those of a step of the variant: the least mean of 12 steps
in a row in all its trainings. So other work on the machine counts for no variant, nor do
validations, which only measure. All losses are of the velocity at the same fixed levels k / 8 and
noise. At k = 0 an x-prediction has another loss: its input is the picture itself, and its error
that of the picture over 0.05, without the noise that no velocity can predict. So there are two
tables: over all levels, as MLPerf has them, and over k = 1 to 7, where all variants have the same
loss. What is finished is read and not trained again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import psutil

from dit.command_line import OptionParser
from dit.distributed.entry import run
from dit.planner.tables import table_of, wide_console

ROOT = Path(__file__).resolve().parents[2]
ROUTING = ("model.route_from=1", "model.route_to=1", "model.route_rate=0.5")
TWO_LEVELS = ("objective.second_level_rate=0.5",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "Muon": ("optimizer.kind=muon", "optimizer.lr=4e-3"),
    "routing": ROUTING,
    "two levels": TWO_LEVELS,
    "routing, two levels": (*ROUTING, *TWO_LEVELS),
    "x-prediction": ("objective.prediction=x",),
}
LEVELS = 8  # as in dit.stored_samples, which imports torch
_AT = 0.8  # of the CPU seconds: where the first variant's loss is the goal
_EVERY = 25  # steps between validations
_TIMED = 12  # steps in a row whose CPU seconds are read
Training = dict[str, Any]
"""Result of a training: CPU seconds of a step (`step_s`), and for each validation the list of
losses by level (`losses`)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains all variants, prints the tables and writes table.json; returns the exit code."""
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("output", type=Path, help="folder of the runs")
    add("--cpu_seconds", type=float, default=90.0, help="of each training (%(default)g)")
    add("--seeds", nargs="+", type=int, default=[1234, 1235, 1236])
    add("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="of all variants")
    options = parser.parse_args(arguments)
    found: dict[str, list[Training]] = {name: [] for name in VARIANTS}
    for seed in options.seeds:  # all variants of a seed first
        for name, own in VARIANTS.items():
            folder = options.output / name.replace(", ", "_").replace(" ", "_") / str(seed)
            keys = [f"rng.seed={seed}", "train.train_iters=100000", *own, *options.keys]
            found[name].append(trained(folder, keys, cpu_seconds=options.cpu_seconds))
    for levels in range(LEVELS), range(1, LEVELS):
        print_table(found, options.cpu_seconds, levels)
    rows = [
        {"variant": name} | {f"k = {k}": _at_end(of, options.cpu_seconds, k) for k in range(LEVELS)}
        for name, of in found.items()
    ]
    wide_console().print(table_of("mean loss at the end at the levels k / 8", rows))
    (options.output / "table.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def trained(folder: Path, keys: Sequence[str], *, cpu_seconds: float = math.inf) -> Training:
    """Trains conf/mlperf_digits.yaml with the overrides `keys` in `folder`; reads a finished run.

    It ends with its last step, or a little after `cpu_seconds` CPU seconds.

    Raises:
        ValueError: the training ended with an error.
    """
    done = folder / "training.json"
    if done.exists():
        return json.loads(done.read_text())
    folder.mkdir(parents=True)
    words = [sys.executable, ROOT / "recipes/pretrain_dit.py"]
    words += ["--config-file", ROOT / "conf/mlperf_digits.yaml", f"checkpoint.save={folder}"]
    words += ["validation.target=null", "logger.mlperf_division=null"]
    words += [f"train.eval_interval={_EVERY}", *keys]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as output:
        child = subprocess.Popen([*map(str, words)], stdout=output, stderr=output, env=alone)
        step_s = _watched(child, folder / "metrics.jsonl", cpu_seconds)
    lines = (folder / "metrics.jsonl").read_text().splitlines() if step_s < math.inf else []
    losses = [one for one in map(json.loads, lines) if "val_loss" in one]
    if child.returncode not in (os.EX_OK, os.EX_TEMPFAIL) or not losses:
        said = (folder / "output.txt").read_text()[-2000:]
        raise ValueError(
            f"the training in {folder} ended before its last step; correct what its output says,"
            f" and remove that folder: {said}"
        )
    of_levels = [[one[f"val_loss_k{k}"] for k in range(LEVELS)] for one in losses]
    found: Training = {"step_s": step_s, "losses": of_levels}
    done.write_text(json.dumps(found) + "\n")
    return found


def _watched(child: subprocess.Popen[bytes], log: Path, cpu_seconds: float) -> float:
    """Watches a training run, and ends it after `cpu_seconds` CPU seconds of steps.

    Returns the CPU seconds of a step, or infinity if no steps were timed.
    """
    process, spent, means = psutil.Process(child.pid), dict[int, float](), [math.inf]
    while child.poll() is None:
        time.sleep(0.05)
        step = log.read_bytes().count(b"\n") if log.exists() else 0
        spent.setdefault(step, sum(process.cpu_times()[:2]))
        # The line of a step with a validation comes after it.
        if step % _EVERY in (_TIMED, 2 * _TIMED) and step - _TIMED in spent:
            means.append((spent[step] - spent[step - _TIMED]) / _TIMED)
        # A tenth more, because another training of the variant may find its steps to be cheaper.
        validated = step // _EVERY * _EVERY
        if len(means) > 1 and validated * min(means) >= 1.1 * cpu_seconds:
            child.send_signal(signal.SIGTERM)  # it saves and ends
            child.wait()
    return min(means)


def print_table(found: Mapping[str, list[Training]], cpu_seconds: float, levels: range) -> None:
    """Prints the CPU seconds after which each training reaches the goal.

    Losses are means over `levels`. `found` has the trainings of each variant, one for each seed.
    """
    curves = {name: [LossByTime.of(one, of, levels) for one in of] for name, of in found.items()}
    goal = fmean(curve.at(_AT * cpu_seconds) for curve in next(iter(curves.values())))
    rows = [_row(name, of, goal, cpu_seconds) for name, of in curves.items()]
    about = f"CPU seconds to a loss of {goal:.4f}, the mean over k = {levels[0]} to {levels[-1]}"
    wide_console().print(table_of(about, rows))


class LossByTime(NamedTuple):
    """A validation loss over CPU seconds, interpolated linearly between validations."""

    seconds: list[float]
    losses: list[float]

    @classmethod
    def of(cls, one: Training, of: Sequence[Training], levels: Iterable[int]) -> LossByTime:
        """The mean loss over `levels` of the training `one`.

        `of` are all trainings of its variant; the fastest one gives the time of a step.
        """
        losses, step_s = one["losses"], min(each["step_s"] for each in of)
        seconds = [step_s * _EVERY * number for number in range(1, len(losses) + 1)]
        return cls(seconds, [fmean(row[k] for k in levels) for row in losses])

    def at(self, seconds: float) -> float:
        """The loss after `seconds` CPU seconds."""
        return float(np.interp(seconds, self.seconds, self.losses))

    def first_at(self, goal: float) -> float | None:
        """The CPU seconds after which the loss first is at or below `goal`; None if it never is."""
        points = [*zip(self.seconds, self.losses, strict=True)]
        for (begin, before), (end, after) in pairwise(points[:1] + points):
            if after <= goal:
                share = (before - goal) / (before - after) if before > goal else 1.0
                return begin + share * (end - begin)
        return None


def _row(
    name: str, curves: Sequence[LossByTime], goal: float, cpu_seconds: float
) -> dict[str, str]:
    reached = [curve.first_at(goal) for curve in curves]
    reached = [None if at is None or at > cpu_seconds else at for at in reached]
    times = [at for at in reached if at is not None]
    last = [curve.at(cpu_seconds) for curve in curves]
    return {
        "variant": name,
        "CPU s a step": f"{curves[0].seconds[0] / _EVERY:.3f}",
        "CPU s to the goal": ", ".join("-" if at is None else f"{at:.0f}" for at in reached),
        "mean": f"{fmean(times):.0f}" if len(times) == len(reached) else "-",
        "last loss": ", ".join(f"{loss:.4f}" for loss in last),
        "mean last loss": f"{fmean(last):.4f}",
    }


def _at_end(of: Sequence[Training], cpu_seconds: float, level: int) -> str:
    return f"{fmean(LossByTime.of(one, of, [level]).at(cpu_seconds) for one in of):.3f}"


if __name__ == "__main__":
    sys.exit(run(main))
