"""Simulates packing: fill of packs, time to choose them, and balance of ranks; needs no data.

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
    alike,
    decreasing_fill,
    simulated_steps,
    straggler_ratios,
    stream_fill,
)

from dit.command_line import OptionParser
from dit.config import Balance
from dit.config_loading import default_config, load_config
from dit.planner.tables import table_of, wide_console


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    console = wide_console()
    chosen = [mixture for mixture in MIXTURES if mixture.name in options.mixtures]
    fills = [
        _fill_row(one, buffer, options.samples) for one in chosen for buffer in options.buffers
    ]
    console.print(table_of("Real tokens over capacity", [*map(_written, fills)]))
    evens = [_even_row(mixture, options) for mixture in chosen if options.ranks]
    if evens:
        title = f"Slowest rank over mean, {options.model}, one pack a step: before -> after"
        title += f" dataset.balance={options.balance}"
        console.print(table_of(title, [*map(_written, evens)]))
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


def _written(row: dict[str, Any]) -> dict[str, str]:
    return {n: f"{v:.4f}" if isinstance(v, float) else str(v) for n, v in row.items()}


if __name__ == "__main__":
    main()
