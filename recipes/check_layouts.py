"""Trains a tiny DiT on one process and on other layouts, and compares every number.

1. packs    mock packs that mix images and videos, sizes, text lengths; most samples are padded
2. train    from random values, on one process and on each layout, with both objectives
3. compare  losses (validation too), gradient norms; of each tensor gradient, weight and average

Run it first on a new cluster: under torch.distributed.run it uses the processes that are there,
otherwise it starts `--nproc` itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dit.config import (
    CheckpointConfig,
    DistConfig,
    MockGeometry,
    ModelConfig,
    ObjectiveName,
    RunConfig,
    ValidationConfig,
)
from dit.config.loading import load_config
from dit.distributed.entry import Parser, run, say_once
from dit.layout_check.names import LAYOUTS, ONE, WORDS, NamedLayout, parse_layout
from dit.layout_check.report import Comparison, compare, print_report
from recipes.runs import dit_debug

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from dit.batch import PackedBatch
    from dit.layout_check.probe import Probe

STEPS = 5
_TURN = timedelta(days=1)
"""For processes that a layout does not need, until the next; those that work are watched."""
# Tokens in patches: 35, 30 (video), 15, 2 and 1, padded to 48, 32, 16, 16 and 16: a pack of the
# last two leaves a context rank with nothing but padding.
MIXTURE = (
    MockGeometry(height=10, width=14, text_length=9, weight=1.0),
    MockGeometry(frames=5, height=4, width=6, text_length=5, fps=12.0, weight=1.0),
    MockGeometry(height=6, width=10, text_length=1, weight=1.0),
    MockGeometry(height=2, width=4, text_length=3, weight=3.0),
    MockGeometry(height=2, width=2, text_length=1, weight=3.0),
)


def layout_check() -> RunConfig:
    """A model of 0.8 M parameters on packs of 96 tokens, EMA included, learning rate 1e-4."""
    base = dit_debug()
    model: ModelConfig = replace(base.model, num_layers=4)
    dataset = replace(
        base.dataset, mock_samples=MIXTURE, task_encoder_seq_length=96, packing_buffer_size=40
    )
    train = replace(base.train, global_batch_size=8, train_iters=1000)
    checkpoint = CheckpointConfig(save=None)
    changed = {"dataset": dataset, "train": train, "checkpoint": checkpoint}
    # A hang is what this looks for: it ends sooner than that of a long run.
    changed |= {"dist": DistConfig(distributed_timeout_minutes=5)}
    return replace(base, model=model, validation=ValidationConfig(quantiles=2), **changed)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 where every layout agrees, 1 otherwise."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    arguments, rest = _parser().parse_known_args(tokens)
    # Words of --layouts go on until the first override.
    overrides = [t for t in arguments.layouts or () if "=" in t] + rest
    names = [t for t in arguments.layouts or () if "=" not in t]
    config = load_config(layout_check(), config_file=arguments.config_file, overrides=overrides)
    processes = int(os.environ.get("WORLD_SIZE", "0")) or arguments.nproc or _default_processes()
    layouts = _chosen(names, config, processes)
    if "RANK" not in os.environ:
        _launch(processes, tokens)
    objectives = list(ObjectiveName)
    if any(token.lstrip("-+").startswith("objective.name") for token in overrides):
        objectives = [config.objective.name]
    return _check(config, layouts, objectives, arguments.output)


def _parser() -> Parser:
    words = "\n".join(f"  {word:<10}{text}" for word, text in WORDS.items())
    parser = Parser(
        prog="check_layouts.py",
        usage="%(prog)s [flags] [KEY=VALUE ...]",
        description="Trains a tiny DiT on one process and on other layouts, and compares every"
        " loss, gradient norm, gradient, weight and average.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"words of a layout, joined by + (tp2+sp+cp2):\n{words}\n\nKEY=VALUE sets a key of"
        " the run, as for pretrain_dit.py; the layout itself comes from its name. Where nothing"
        " goes on for dist.distributed_timeout_minutes (5), all end, and it says what each was at.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="processes to start; default: GPUs here, else 4")
    add("--layouts", nargs="+", metavar="LAYOUT", help="default: all that N processes can run")
    add("--config-file", type=Path, metavar="FILE", help="YAML file, as those in conf/")
    add("--output", type=Path, metavar="FILE", help="write every number of every tensor as JSON")
    add("--debug", action="store_true", help="show where in the code an error was raised")
    return parser


def _default_processes() -> int:
    import torch

    return torch.cuda.device_count() or 4


def _chosen(names: Sequence[str], config: RunConfig, processes: int) -> list[NamedLayout]:
    """The layouts to try, each checked.

    Raises:
        ValueError: one needs more processes, or does not divide.
    """
    layouts = [parse_layout(name) for name in names or LAYOUTS]
    if not names:
        layouts = [layout for layout in layouts if layout.size <= processes]
    for layout in layouts:
        if layout.size > processes:
            raise ValueError(
                f"--layouts {layout.name} needs {layout.size} processes, and there are {processes};"
                f" use --nproc {layout.size}"
            )
        layout.of(config).data_parallel_size(layout.size)
    return layouts


def _launch(processes: int, tokens: list[str]) -> None:
    """Becomes a launcher of this script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # After --, or the launcher would read --nproc as a short form of its own options.
    script = ["--", str(Path(__file__).resolve()), *tokens]
    os.execv(sys.executable, [sys.executable, *launcher, *script])


def _check(
    config: RunConfig,
    layouts: Sequence[NamedLayout],
    objectives: Sequence[ObjectiveName],
    output: Path | None,
) -> int:
    from torch.distributed.rendezvous import rendezvous

    from dit.distributed.process_groups import rank

    references = dict.fromkeys([ONE, *(layout.reference for layout in layouts)])
    every = [parse_layout(name) for name in references] + list(layouts)
    store, *_ = next(iter(rendezvous("env://")))
    packs: list[PackedBatch] | None = None
    probes: dict[tuple[str, str], Probe] = {}
    comparisons: list[Comparison] = []
    for number, layout in enumerate(every):
        if rank() >= layout.size:
            continue
        with _processes(layout, layout.of(config), store, number):
            for objective in objectives:
                c = replace(config, objective=replace(config.objective, name=objective))
                with _watching(layout, c):
                    packs = packs or _packs(c, steps_of=every)
                    from dit.layout_check.probe import probe

                    result = probe(layout.of(c), packs, steps=STEPS)
                if rank() > 0:
                    continue
                if layout.name in references:
                    probes[layout.name, objective] = result
                reference = probes[layout.reference, objective]
                comparison = compare(result, reference, layout=layout, objective=objective)
                comparisons.append(comparison)
                sys.stderr.write(f"{layout.name} {objective}: {comparison.verdict}\n")
    if rank() > 0:
        return 0
    print_report(comparisons)
    if output is not None:
        output.write_text(json.dumps([c.as_json() for c in comparisons], indent=1))
    return 0 if all(c.good for c in comparisons) else 1


@contextmanager
def _processes(layout: NamedLayout, config: RunConfig, store: Store, number: int) -> Iterator[None]:
    """The process group of a layout, and of it alone."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from dit.distributed.process_groups import rank, start_processes

    mine, limit_s = PrefixStore(f"layout {number}", store), _limit_s(config)
    if rank() == 0:
        mine.set("begins", "")
    mine.wait(["begins"], _TURN)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=mine,
        rank=rank(),
        world_size=layout.size,
        timeout=timedelta(seconds=limit_s + 60),
    )
    start_processes(seed=config.rng.seed, model=config.model, limit_s=limit_s)
    yield
    dist.destroy_process_group()


def _watching(layout: NamedLayout, config: RunConfig) -> AbstractContextManager[None]:
    """Inside, a process that hangs or dies ends the check; the error names layout and process."""
    from dit.distributed.watchdog import watchdog

    def say(message: str) -> None:
        say_once(f"layout {layout.name}, {config.objective.name}: {message}")

    return watchdog(limit_s=_limit_s(config), say=say, again="")


def _limit_s(config: RunConfig) -> float:
    return 60 * config.dist.distributed_timeout_minutes


def _packs(config: RunConfig, *, steps_of: Sequence[NamedLayout]) -> list[PackedBatch]:
    """The packs of all steps of the layout that takes most: the same on every rank of every one."""
    from dit.data import build_train_loader

    loader = build_train_loader(config, rank=0, world_size=1)
    a_step = max(layout.of(config).train.global_batch_size for layout in steps_of)
    packs = list(islice(loader, STEPS * a_step))
    loader.close()
    return packs


if __name__ == "__main__":
    sys.exit(run(main))
