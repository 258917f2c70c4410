"""Estimates a run on a number of GPUs, for each layout: memory, communication and time.

    python recipes/plan_run.py --config-file conf/dit_xl_video.yaml --gpus 64 --device h100

It is arithmetic: nothing is trained, and no device is needed. Rates of devices are in
dit/device_specs.py, those of software in dit/planner/efficiency.py. Samples are those of
dataset.mock_samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit.command_line import OptionParser
from dit.config_loading.cli import parse_arguments
from dit.console import Console
from dit.device_specs import DEVICES
from dit.distributed.entry import run
from dit.planner.efficiency import EFFICIENCIES, efficiency_of
from dit.planner.layouts import batch_plans, break_even, plans, recommended
from dit.planner.tables import as_json, print_tables
from dit.planner.times import expected_load, not_modelled
from dit.progress import progress_on
from dit.streams import result
from recipes.runs import RECIPES, for_weights


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the estimates that the command line `argv` asks for.

    Returns exit code 0, or 1 if no layout works.
    """
    options, others = _parser().parse_known_args(argv)
    config = parse_arguments(
        others, recipes=RECIPES, program="plan_run.py", adapt=for_weights
    ).config
    load, gpus, name = expected_load(config), options.gpus, options.device
    efficiency = EFFICIENCIES.get(options.kernels) or efficiency_of(config.model, config.train)
    track = progress_on(Console(stderr=True), quiet_s=2.0)
    machine: dict[str, Any] = {"world_size": gpus, "device": DEVICES[name]}
    machine |= {"efficiency": efficiency, "track": track}
    good, bad = plans(config, load, **machine)
    batches = batch_plans(config, load, **machine)
    title = f"{gpus} x {name}, {config.model.name}, packs of {load.tokens:,.0f} real tokens,"
    title += (
        f" {config.train.global_batch_size} a step. An estimate: see docs/throughput_reference.md"
    )
    title += f"\nAssumed: {efficiency.of(DEVICES[name])}"
    if left := not_modelled(config.lora):
        title += f"\nNot in the times: {'; '.join(left)}"
    del machine["track"]
    title += "\n".join(["", recommended(good), break_even(config, **machine)])
    tokens, why = options.tokens * 1e9, options.refused
    with result():
        print_tables(title, good[: options.best], bad, batches, tokens=tokens, why=why)
    if options.json:
        options.json.write_text(json.dumps(as_json(good, bad, batches), indent=1) + "\n")
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").splitlines()[0]
    epilog = "All other arguments are those of pretrain_dit.py: --config-file, key=value, ..."
    parser = OptionParser(description=about, epilog=epilog)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="devices of the run")
    add("--device", choices=DEVICES, default="h100")
    add(
        "--kernels",
        choices=EFFICIENCIES,
        help="attention: plain (FlashAttention-2) or fused (FlashAttention-3 or newer, cuDNN's)."
        " (default: by model.attention_backend; auto is plain, or fused with"
        " model.transformer_impl=transformer_engine)",
    )
    add("--tokens", type=float, default=1000.0, help="billions of real tokens (%(default)g)")
    add("--best", type=int, default=10, help="layouts to show (%(default)s)")
    add("--refused", action="store_true", help="list every layout that does not work, and why")
    add("--json", type=Path, help="file for all numbers")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
