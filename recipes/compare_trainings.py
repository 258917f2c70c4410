r"""Trains variants of one configuration with several seeds, judges each, and prints a table.

    python recipes/compare_trainings.py --output runs/muon --config_file conf/dit_digits.yaml \
        --keys train.train_iters=250 --variant AdamW optimizer.lr=4e-3 \
        --variant Muon optimizer.kind=muon optimizer.lr=8e-3 --seeds 1234 1235 1236 \
        --judge "recipes/evaluate_digits.py --per_prompt 20"

A run is the folder OUTPUT/VARIANT/SEED; a finished run is read and not trained again. Validation
draws the same noise levels for all, so its losses can be compared. CPU seconds are the user time of
a training with its child processes, without that of the judge.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dit.command_line import OptionParser
from dit.distributed.entry import run
from dit.planner.tables import table_of, wide_console

PRETRAIN = Path(__file__).resolve().with_name("pretrain_dit.py")
LOSSES = ("val_loss", "val_loss_ema")


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and judges the variants, prints the table and writes comparison.json; returns 0.

    Raises:
        ValueError: a training failed, or was interrupted before.
    """
    options = _parse(arguments)
    rows = []
    for name, *keys in options.variant:
        found = [
            _figures(options.output.resolve() / name / str(seed), seed, keys, options)
            for seed in options.seeds
        ]
        rows += [
            {"variant": name, "seed": str(seed)} | one
            for seed, one in zip(options.seeds, found, strict=True)
        ]
        if len(found) > 1:
            rows.append({"variant": name, "seed": "mean"} | _mean(found))
    wide_console().print(
        table_of(f"{options.config_file}: {shlex.join(options.keys)}", [*map(_written, rows)])
    )
    (options.output / "comparison.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the runs and of comparison.json")
    add("--config_file", type=Path, required=True, help="configuration of all variants")
    of_all: dict[str, Any] = {
        "nargs": "*",
        "action": "extend",
        "default": [],
        "metavar": "KEY=VALUE",
    }
    add("--keys", **of_all, help="overrides of all variants")
    add(
        "--variant",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "KEY=VALUE"),
        help="a name and overrides of its own; once for each variant",
    )
    add("--seeds", nargs="+", type=int, default=[1234], help="rng.seed of each run (1234)")
    add("--judge", help="command that gets --checkpoint_path RUN and writes RUN/evaluation.json")
    return parser.parse_args(arguments)


def _figures(
    folder: Path, seed: int, keys: Sequence[str], options: argparse.Namespace
) -> dict[str, float]:
    """Figures of the run in `folder`, by name: CPU seconds, losses, and those of the judge.

    The run is trained and judged, unless that was done before. `keys` are the overrides of its
    variant.

    Raises:
        ValueError: a training failed, or was interrupted before.
    """
    kept = folder / "comparison.json"
    if not kept.exists():
        if folder.exists():
            raise ValueError(
                f"the training in {folder} was broken off; remove that folder, so that all CPU"
                " seconds of its training are counted"
            )
        words = [PRETRAIN, "--config-file", options.config_file, *options.keys, *keys]
        cpu_s = _run([*words, f"checkpoint.save={folder}", f"rng.seed={seed}"])
        found = {"cpu_s": cpu_s} | _losses(folder)
        if options.judge:
            # Its exit code says whether it was content.
            _run([*shlex.split(options.judge), "--checkpoint_path", str(folder)], check=False)
            if not (said := folder / "evaluation.json").is_file():
                raise ValueError(f"--judge {options.judge} wrote no {said}; its error stands above")
            found |= _numbers(json.loads(said.read_text()))
        kept.write_text(json.dumps(found) + "\n")
    return json.loads(kept.read_text())


def _run(words: Sequence[str | Path], *, check: bool = True) -> float:
    """Runs the Python script `words[0]` with its arguments; returns its user CPU seconds.

    Raises:
        ValueError: its exit code is not 0, and `check` is set.
    """
    before = os.times().children_user
    done = subprocess.run([sys.executable, *words])
    if check and done.returncode:
        said = " ".join(map(str, words))
        raise ValueError(f"{said} ended with exit code {done.returncode}; its error stands above")
    return os.times().children_user - before


def _losses(folder: Path) -> dict[str, float]:
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    if not (validated := [step for step in steps if LOSSES[0] in step]):
        raise ValueError(f"{folder} was never validated; set train.eval_interval above 0")
    return {name: validated[-1][name] for name in LOSSES if name in validated[-1]}


def _numbers(report: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in report.items() if isinstance(value, int | float)}


def _mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in found) for name in found[0]}


def _written(row: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{value:.4g}" if isinstance(value, float) else str(value)
        for name, value in row.items()
    }


if __name__ == "__main__":
    sys.exit(run(main))
