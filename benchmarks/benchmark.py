r"""Measures steps of a run: times of its parts, real tokens a second, model TFLOP/s, MFU.

1. warm-up   steps that allocate memory and fill buffers
2. steps     each as a line of metrics.jsonl; on a GPU each part is synchronized before it is timed
3. peaks     FLOP/s of the data sheet, and measured on large matrix products
4. figures   a table, and a JSON file with the figures of each step as well

The weights are random, and nothing is saved. With `--beside`, the run and the same run with other
keys take turns in one launch, and the table has the ratios:

    python -m torch.distributed.run --standalone --nproc-per-node 8 benchmarks/benchmark.py \
        --config-file conf/dit_xl_image.yaml --mock --beside ddp.sharding=weights
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from measuring.shapes import SHAPES, shape_keys

from dit.config import RunConfig
from dit.config_loading.cli import parse_arguments
from dit.config_loading.load import to_yaml
from dit.distributed.entry import Parser, run
from dit.launched import check_launch, rank, world_size
from dit.sizing.describe import describe
from dit.streams import result
from recipes.runs import RECIPES, for_weights, read_folder

_EPILOG = (
    "All other arguments are those of pretrain_dit.py: --config-file FILE, --recipe NAME, --mock,"
    " --dataset-path DIR, --dry-run, --print-config, --debug, KEY=VALUE ..."
)


def main(argv: Sequence[str] | None = None) -> int:
    options, others = (parser := _parser()).parse_known_args(argv)
    if options.shape:
        others = [*shape_keys(options.shape), *others]
    if options.profile and options.beside:
        parser.error("--profile traces one run: leave out --beside")
    arguments = parse_arguments(others, recipes=RECIPES, program="benchmark.py", adapt=for_weights)
    config = only_steps(arguments.config)
    if not (arguments.dry_run or arguments.print_config):
        check_launch()
    config.data_parallel_size(world_size())
    if arguments.dry_run or arguments.print_config:
        if rank() == 0:
            with result():
                _describe(config, world_size=world_size(), check=arguments.dry_run)
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    if options.beside:
        told = {"recipes": RECIPES, "program": "benchmark.py", "adapt": for_weights}
        other = only_steps(parse_arguments([*others, *options.beside], **told).config)
        return _compare(config, other, options)
    count = {"warm_up": options.warm_up, "steps": options.steps}
    trace = _trace(options.json, rank()) if options.profile else None
    found, steps = measure(config, **count, around=trace or nullcontext())
    if trace is not None:
        from measuring.kernels import kernel_times, kernels_of

        step_s = found["step_time_s"]["median"]
        found |= kernel_times(kernels_of(trace), steps=options.steps, step_s=step_s)
    if rank() == 0:
        options.json.write_text(json.dumps(found | {"steps": steps}, indent=1) + "\n")
        _print(found)
        sys.stdout.write(f"written: {options.json}\n")
    return 0


def _describe(config: RunConfig, *, world_size: int, check: bool) -> None:
    config.data_parallel_size(world_size)
    if not check:
        sys.stdout.write(to_yaml(config))
        return
    from dit.sizing.passes import data_lines

    sys.stdout.write(describe(config, world_size=world_size))
    sys.stdout.write(data_lines(config))


def _compare(config: RunConfig, other: RunConfig, options: Namespace) -> int:
    from measuring.turns import print_turns, take_turns

    other.data_parallel_size(world_size())
    runs = {"as given": config, " ".join(options.beside): other}
    count = {"rounds": options.rounds, "warm_up": options.warm_up, "steps": options.steps}
    turns = take_turns(runs, **count, read_folder=read_folder)
    if rank() == 0:
        options.json.write_text(json.dumps(turns, indent=1) + "\n")
        print_turns(turns)
        sys.stdout.write(f"written: {options.json}\n")
    return 0


def measure(
    config: RunConfig,
    *,
    warm_up: int,
    steps: int,
    around: AbstractContextManager[Any],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs `warm_up` steps and then `steps` measured steps; all ranks must call it.

    Returns (summary, values): the summary is that of `step_summary`, and values has one dict for
    each measured step, as in metrics.jsonl. The measured steps run in the context `around`.
    """
    from measuring.steps import fill_on_device, step_summary, watched_processes

    with watched_processes(config):
        from dit.train.timers import synchronize_timers
        from dit.train.trainer import measure_steps

        synchronize_timers()
        fill = partial(fill_on_device, seed=config.rng.seed)
        told = {"fill": fill, "read_folder": read_folder}
        found = measure_steps(config, warm_up=warm_up, steps=steps, around=around, **told)
        return step_summary(config.model, found), found


def _parser() -> Parser:
    parser = Parser(
        prog="benchmark.py",
        description=(__doc__ or "").splitlines()[0],
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=20, help="measured steps (%(default)s)")
    add("--warm-up", type=_positive, default=3, help="steps before them (%(default)s)")
    add("--shape", choices=SHAPES, help="a network and its packs, as `make gpu` measures them")
    add("--json", type=Path, default=Path("runs/benchmark.json"), help="(%(default)s)")
    add("--profile", action="store_true", help="a trace of each process, beside the JSON file")
    add("--beside", action="append", metavar="KEY=VALUE", help="a key of a second run, in turns")
    add("--rounds", type=_positive, default=5, help="turns of each with --beside (%(default)s)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(
            f"{text!r} is not a whole number of at least 1; give one such as 20"
        )
    return int(text)


def only_steps(config: RunConfig) -> RunConfig:
    """The configuration of the same steps, without saving, loading and validating."""
    return replace(
        config,
        checkpoint=replace(config.checkpoint, save=None, load=None, load_hf=None),
        train=replace(config.train, eval_interval=0),
    )


def _trace(file: Path, rank: int) -> Any:
    """A profiler that writes a trace for chrome://tracing next to `file`; it slows down steps."""
    from torch.profiler import profile

    place = file.with_name(f"{file.stem}_trace_rank{rank}.json")
    return profile(on_trace_ready=lambda trace: trace.export_chrome_trace(str(place)))


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from dit.console import Console

    table = Table(title=f"{found['processes']} x {found['device']}", title_justify="left")
    for name in ("", "median", "5%", "95%", "share"):
        table.add_column(name, justify="right" if name else "left")
    for name, share in {"step_time_s": 1.0, **found["shares"]}.items():
        spread = found[name]
        numbers = (f"{spread[key]:.4g}" for key in ("median", "p5", "p95"))
        table.add_row(name, *numbers, f"{share:.1%}")
    table.add_section()
    for name in ("tokens_per_s", "samples_per_s", "pack_fill", "model_tflops"):
        table.add_row(name, *(f"{found[name][key]:,.4g}" for key in ("median", "p5", "p95")))
    for kind, peak in found["peak_tflops"].items():
        table.add_row(f"MFU of {peak:.4g} TFLOP/s ({kind})", f"{found['mfu'][kind]:.1%}")
    table.add_row("peak_memory_gb, fullest process", f"{found['peak_memory_gb']:.3g}")
    table.add_section()
    for kind, seconds in found.get("by_kind_s", {}).items():
        share = f"{seconds / found['kernels_s']:.1%}"
        table.add_row(f"kernels: {kind}", f"{seconds:.4g}", "", "", share)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run(main))
