"""How full packs get, how long choosing takes, and how even the cost of ranks is. Needs no data.

python benchmarks/benchmark_packing.py --buffers 32 64 256 --ranks 8 64 512
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring.mixtures import MIXTURES
from measuring.packing_simulation import (
    decreasing_fill,
    step_costs,
    straggler_ratios,
    stream_fill,
)
from rich.console import Console
from rich.table import Table

from dit.config.loading import default_config, load_config

_STEPS = 128  # measured steps; as many before them fill the buffer of waiting packs


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    console = Console()
    fills = [_fill_row(mixture, buffer, options.samples) for mixture, buffer in _pairs(options)]
    console.print(_table("Real tokens over capacity", fills))
    evens = [_even_row(mixture, options) for mixture in MIXTURES] if options.ranks else []
    if evens:
        title = f"Slowest rank over mean, {options.model}, one pack a step: before -> after"
        console.print(_table(f"{title} dataset.balance=flops", evens))
    if options.json:
        options.json.write_text(json.dumps({"fill": fills, "stragglers": evens}, indent=1) + "\n")
        console.print(f"written: {options.json}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--buffers", type=int, nargs="+", default=[32, 64, 128, 256, 1024, 4096], help="samples")
    add("--samples", type=int, default=8192, help="samples packed for each number (%(default)s)")
    add("--ranks", type=int, nargs="*", default=[8, 64, 256], help="none: no simulation")
    add("--balance-packs", type=int, default=64, help="dataset.balance_packs (%(default)s)")
    add("--model", default="dit_xl", help="model.name, for the cost of a pack (%(default)s)")
    add("--json", type=Path, help="file for the numbers")
    return parser.parse_args(arguments)


def _pairs(options: argparse.Namespace) -> list[tuple[Any, int]]:
    return [(mixture, buffer) for mixture in MIXTURES for buffer in options.buffers]


def _fill_row(mixture: Any, buffer: int, samples: int) -> dict[str, Any]:
    fill = stream_fill(mixture, buffer=buffer, samples=max(samples, 2 * buffer))
    decreasing = decreasing_fill(mixture, buffer=buffer, samples=max(samples, 2 * buffer))
    return {
        "mixture": mixture.name,
        "buffer": buffer,
        "fill": fill.real,
        "with padding": fill.padded,
        "best-fit decreasing": decreasing,
        "ms per pack": fill.milliseconds,
        "longest wait": fill.longest_wait,
    }


def _even_row(mixture: Any, options: argparse.Namespace) -> dict[str, Any]:
    model = load_config(default_config(), overrides=[f"model.name={options.model}"]).model
    row: dict[str, Any] = {"mixture": mixture.name}
    found = []
    for packs in (0, options.balance_packs):
        sizes = {"ranks": max(options.ranks), "steps": 2 * _STEPS, "balance_packs": packs}
        costs = step_costs(mixture, model, **sizes)[:, _STEPS:]
        found.append(straggler_ratios(costs, ranks=options.ranks))
    for ranks, before, after in zip(options.ranks, *found, strict=True):
        row[f"{ranks} ranks"] = f"{before:.3f} -> {after:.3f}"
    return row


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "mixture" else "right")
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table


if __name__ == "__main__":
    main()
