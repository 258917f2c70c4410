"""How full packs get, how long choosing takes, and how even the cost of ranks is. Needs no data.

python benchmarks/benchmark_packing.py --buffers 32 64 256 --ranks 8 64 512
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring.packing_simulation import (
    MIXTURES,
    Mixture,
    alike,
    decreasing_fill,
    simulated_steps,
    straggler_ratios,
    stream_fill,
)
from rich.table import Table

from dit.command_line import OptionParser
from dit.config import Balance
from dit.config_loading import default_config, load_config
from dit.console import Console


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    console = Console()
    fills = [_fill_row(mixture, buffer, options.samples) for mixture, buffer in _pairs(options)]
    console.print(_table("Real tokens over capacity", fills))
    evens = [_even_row(mixture, options) for mixture in _chosen(options) if options.ranks]
    if evens:
        title = f"Slowest rank over mean, {options.model}, one pack a step: before -> after"
        console.print(_table(f"{title} dataset.balance={options.balance}", evens))
    if options.json:
        options.json.write_text(json.dumps({"fill": fills, "stragglers": evens}, indent=1) + "\n")
        console.print(f"written: {options.json}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--buffers", type=int, nargs="+", default=[32, 64, 128, 256, 1024, 4096], help="samples")
    add("--samples", type=int, default=8192, help="samples packed for each number (%(default)s)")
    add("--ranks", type=int, nargs="*", default=[8, 64, 256], help="none: no simulation")
    kinds = [Balance.FLOPS, Balance.FLOPS_TARGET]
    add("--balance", type=Balance, choices=kinds, default=kinds[1], help="dataset.balance")
    add("--balance-packs", type=int, default=256, help="dataset.balance_packs (%(default)s)")
    add("--steps", type=int, default=32, help="simulated steps that are counted (%(default)s)")
    add("--mixtures", nargs="+", default=[m.name for m in MIXTURES], help="(all)")
    add("--model", default="dit_xl", help="model.name, for the cost of a pack (%(default)s)")
    add("--json", type=Path, help="file for the numbers")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[Mixture]:
    return [mixture for mixture in MIXTURES if mixture.name in options.mixtures]


def _pairs(options: argparse.Namespace) -> list[tuple[Any, int]]:
    return [(mixture, buffer) for mixture in _chosen(options) for buffer in options.buffers]


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
    sizes = {"ranks": max(options.ranks), "steps": options.steps}
    sizes["balance_packs"] = options.balance_packs
    kinds = (Balance.NONE, options.balance)
    before, after = (simulated_steps(mixture, model, balance=kind, **sizes) for kind in kinds)
    ratios = [straggler_ratios(steps.costs, ranks=options.ranks) for steps in (before, after)]
    row: dict[str, Any] = {"mixture": mixture.name}
    for ranks, was, now in zip(options.ranks, *ratios, strict=True):
        row[f"{ranks} ranks"] = f"{was:.3f} -> {now:.3f}"
    spreads = [float(steps.costs.std() / steps.costs.mean()) for steps in (before, after)]
    return row | {
        "spread of costs": "{:.3f} -> {:.3f}".format(*spreads),
        "alike": alike(after.mean_lengths),
        "fill": f"{before.fill:.3f} -> {after.fill:.3f}",
        "longest wait": f"{before.longest_wait} -> {after.longest_wait}",
    }


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "mixture" else "right")
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table


if __name__ == "__main__":
    main()
