"""What a run would take on so many devices: memory, traffic, step time, days, for every layout.

    python recipes/plan_run.py --config-file conf/dit_xl_video.yaml --gpus 64 --device h100

Arithmetic only: nothing runs, no device is needed. Rates of devices are in
dit/distributed/device_specs.py, those of software in dit/planner/efficiency.py. Samples are those
of dataset.mock_samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dit.config.loading import parse_arguments
from dit.distributed.device_specs import DEVICES
from dit.distributed.entry import run
from dit.planner.efficiency import FUSED, PLAIN
from dit.planner.layouts import LayoutPlan, Refusal, plans
from dit.planner.times import expected_load
from recipes.runs import RECIPES

_EFFICIENCY = {"fused": FUSED, "plain": PLAIN}


def main(argv: Sequence[str] | None = None) -> int:
    options, others = _parser().parse_known_args(argv)
    config = parse_arguments(others, recipes=RECIPES, program="plan_run.py").config
    device = DEVICES[options.device]
    load = expected_load(config)
    good, bad = plans(
        config,
        load,
        world_size=options.gpus,
        device=device,
        efficiency=_EFFICIENCY[options.kernels],
    )
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{options.gpus} x {options.device}, {config.model.name}, packs of {load.tokens:,.0f} real"
        f" tokens, {config.train.global_batch_size} a step. An estimate: see docs/throughput.md"
    )
    best = good[: options.best]
    if best:
        console.print(_table("", [_speed(plan, options.tokens * 1e9) for plan in best]))
        console.print(_table("GB on the fullest device", [_memory(plan) for plan in best]))
        title = "GB a device sends in a step, and seconds that the step waits for it"
        console.print(_table(title, [_traffic(plan) for plan in best]))
    _say_why(console, bad, options.refused)
    if options.json:
        options.json.write_text(json.dumps(_plain(good, bad), indent=1) + "\n")
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="All other arguments are those of pretrain_dit.py: --config-file, key=value, ...",
    )
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="devices of the run")
    add("--device", choices=DEVICES, default="h100")
    add("--kernels", choices=_EFFICIENCY, default="fused", help="fused: FlashAttention-3 or TE's")
    add("--tokens", type=float, default=1000.0, help="10^9 real tokens to train (%(default)g)")
    add("--best", type=int, default=10, help="layouts to show (%(default)s)")
    add("--refused", action="store_true", help="list every layout that does not work")
    add("--json", type=Path, help="file for all numbers")
    return parser


def _speed(plan: LayoutPlan, tokens: float) -> dict[str, str]:
    return _name(plan) | {
        "peak GB": f"{plan.memory.total / 1e9:.1f}",
        "bubble": f"{plan.bubble:.1%}",
        "step s": f"{plan.times.step:.3g}",
        "TFLOP/s": f"{plan.tflops:.0f}",
        "MFU": f"{plan.mfu:.1%}",
        "days": f"{tokens / plan.tokens_per_s / 86400:.3g}",
    }


def _memory(plan: LayoutPlan) -> dict[str, str]:
    need = plan.memory
    gb = {
        "weights": need.weights,
        "grads": need.gradients,
        "optim.": need.optimizer,
        "EMA": need.ema,
        "activ.": need.activations,
        "peak": need.total,
    }
    return _name(plan) | {name: f"{size / 1e9:.1f}" for name, size in gb.items()}


def _traffic(plan: LayoutPlan) -> dict[str, str]:
    return _name(plan) | {
        kind: f"{size / 1e9:.3g}, {getattr(plan.times, kind):.1g}" if size else "-"
        for kind, size in asdict(plan.traffic).items()
    }


def _name(plan: LayoutPlan) -> dict[str, str]:
    layout = plan.layout
    stages = f"{layout.pipeline}" + (f"x{layout.virtual}" if layout.virtual > 1 else "")
    sizes = (layout.tensor, layout.context, stages, layout.data)
    return {"TP-CP-PP-DP": "-".join(map(str, sizes)), "recompute": str(layout.recompute)}


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _say_why(console: Console, bad: list[Refusal], every: bool) -> None:
    if every:
        for one in bad:
            console.print(f"{one.layout}: {one.why}", markup=False)
    elif bad:
        short = Counter("do not fit" if "GB of" in one.why else "break a rule" for one in bad)
        counts = ", ".join(f"{count} {kind}" for kind, count in short.items())
        console.print(f"{counts}; --refused says why for each")


def _plain(good: list[LayoutPlan], bad: list[Refusal]) -> dict[str, Any]:
    return {
        "plans": [asdict(plan) | {"step_s": plan.times.step} for plan in good],
        "refused": [asdict(refusal) for refusal in bad],
    }


if __name__ == "__main__":
    sys.exit(run(main))
