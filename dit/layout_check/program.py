"""Trains tiny networks on one process and on other layouts, and compares every number.

1. packs    mock packs that mix images and videos, sizes, text lengths; most samples are padded
2. train    from random values, on one process and on each layout: the DiT with both objectives,
            or, with `--family`, a network of each kind with the objective of its family
3. compare  losses (also of validation), gradient norms; gradient, weight and average of each tensor

Run it first on a new cluster: under torch.distributed.run it uses the launched processes, otherwise
it starts `--nproc` itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dit.config import OBJECTIVES, DistConfig, RunConfig
from dit.config.checks import Problems
from dit.config_loading import load_config
from dit.distributed.entry import Parser, say_once
from dit.launched import check_launch, meet, meets_others, rank, world_size
from dit.layout_check.names import (
    LAYOUTS,
    MATRIX,
    ONE,
    WORDS,
    NamedLayout,
    chosen_sizes,
    kind_settings,
    parse_layout,
)
from dit.layout_check.report import Comparison, bounds_of, compare, print_report, training_name

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from dit.batch import PackedBatch
    from dit.layout_check.probe import Probe

STEPS = 5
_TURN = timedelta(days=1)
"""Time for which idle processes wait for the next layout; the watchdog limits working ones."""


def check_layouts(tokens: list[str], *, base: RunConfig, script: Path) -> int:
    """Runs the command line `tokens`; the exit code is 0 if all layouts agree, else 1.

    `base` is the run to check. Without a launcher, this process is replaced by a launcher that runs
    `script` with the same arguments.
    """
    arguments, rest = _parser().parse_known_args(tokens)
    check_launch()
    # argparse takes everything after --layouts and --family, so overrides are separated here.
    names, of_layouts = _split(arguments.layouts)
    families, of_families = _split(arguments.family)
    overrides = [*of_layouts, *of_families, *rest]
    trainings: list[RunConfig] = []
    mixture, sizes = base.dataset.mock_samples, chosen_sizes(families)
    kinds = [kind_settings(size, mixture) for size in sizes] if families else [[]]
    for kind in kinds:
        lines = [*kind, *overrides]
        config = load_config(base, config_file=arguments.config_file, overrides=lines)
        # With the objective that is given, or with every objective.
        given = any(token.lstrip("-+").startswith("objective.name") for token in overrides)
        objectives = [config.objective.name] if kind or given else [*OBJECTIVES]
        trainings += [
            replace(config, objective=replace(config.objective, name=name)) for name in objectives
        ]
    default = _devices() or (8 if families else 4)
    processes = world_size() if meets_others() else arguments.nproc or default
    layouts = [parse_layout(name) for name in names or (MATRIX if families else LAYOUTS)]
    if not names:
        layouts = [layout for layout in layouts if layout.size <= processes]
    _check_sizes(layouts, trainings, processes)
    if not meets_others():
        _launch(processes, script, tokens)
    return _check(trainings, layouts, arguments.output)


def _split(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """`words` divided into layout names and settings of the form KEY=VALUE."""
    names = [word for word in words or () if "=" not in word]
    return names, [word for word in words or () if "=" in word]


def _parser() -> Parser:
    words = "\n".join(f"  {word:<11}{text}" for word, text in WORDS.items())
    parser = Parser(
        prog="check_layouts.py",
        usage="%(prog)s [flags] [KEY=VALUE ...]",
        description="Trains a tiny DiT, or tiny networks of other kinds, on one process and on"
        " other layouts, and compares every loss, gradient norm, gradient, weight and average.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"names of layouts, joined by + (tp2+sp+cp2):\n{words}\n\nKEY=VALUE sets a key of"
        " the run, as for pretrain_dit.py; --layouts decides the layout. After"
        " dist.distributed_timeout_minutes (5) without progress the check ends, and names the last"
        " action of each process.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="processes to start (default: one per GPU, else 4)")
    add(
        "--layouts",
        nargs="+",
        metavar="LAYOUT",
        help="default: all layouts that N processes can run",
    )
    add(
        "--family",
        nargs="+",
        metavar="NAME",
        help="instead of a DiT, train tiny networks of a family, of a named size, or of `all`;"
        " without GPUs, --nproc is then 8",
    )
    add("--config-file", type=Path, metavar="FILE", help="YAML file, such as those in conf/")
    add("--output", type=Path, metavar="FILE", help="write every number of every tensor as JSON")
    add("--debug", action="store_true", help="show where in the code an error was raised")
    return parser


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


def _check_sizes(
    layouts: Sequence[NamedLayout], trainings: Sequence[RunConfig], processes: int
) -> None:
    """Refuses layouts that need more processes, or that do not divide a network.

    Raises:
        ValueError: a layout needs more than `processes`.
        Problems: a layout does not suit a network of `trainings`.
    """
    for layout in layouts:
        if layout.size > processes:
            raise ValueError(
                f"--layouts {layout.name} needs {layout.size} processes, and there are {processes};"
                f" use --nproc {layout.size}"
            )
        for config in trainings:
            try:
                layout.of(config).data_parallel_size(layout.size)
            except Problems as error:
                named = f"--layouts {layout.name} (--help says what its words set)"
                raise Problems([f"{named}: {problem}" for problem in error.problems]) from error


def _launch(processes: int, script: Path, tokens: list[str]) -> None:
    """Replaces this process by a launcher that runs `script` in `processes` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # After --, or the launcher would read --nproc as a short form of its own options.
    command = [sys.executable, *launcher, "--", str(script), *tokens]
    os.execv(sys.executable, command)


def _check(
    trainings: Sequence[RunConfig], layouts: Sequence[NamedLayout], output: Path | None
) -> int:
    references = dict.fromkeys([ONE, *(layout.reference for layout in layouts)])
    every = [parse_layout(name) for name in references] + list(layouts)
    store = meet(timedelta(seconds=_limit_s(trainings[0].dist)))
    # By name of the network, and whether samples are pairs
    read: dict[tuple[str, bool], Callable[[], list[PackedBatch]]] = {}
    probes: dict[tuple[str, int], Probe] = {}
    comparisons: list[Comparison] = []
    for number, layout in enumerate(every):
        if rank() >= layout.size:
            continue
        with _processes(layout, layout.of(trainings[0]), store, number):
            for index, config in enumerate(trainings):
                with _watching(layout, config):
                    from dit.layout_check.probe import probe

                    name = config.model.name
                    packs = read.setdefault(
                        (name, layout.pairs), cache(partial(_packs, config, layout, steps_of=every))
                    )
                    result = probe(
                        layout.of(config),
                        packs,
                        steps=STEPS,
                        rounding=bounds_of(bf16=layout.bf16)["gradient"],
                        frozen=layout.frozen_adapters(config.model),
                    )
                if rank() > 0:
                    continue
                if layout.name in references:
                    probes[layout.name, index] = result
                comparison = compare(
                    result, probes[layout.reference, index], layout=layout, config=config
                )
                comparisons.append(comparison)
                sys.stderr.write(f"{layout.name} {comparison.training}: {comparison.verdict}\n")
    if rank() > 0:
        return 0
    print_report(comparisons)
    if output is not None:
        output.write_text(json.dumps([c.as_json() for c in comparisons], indent=1))
    return 0 if all(c.good for c in comparisons) else 1


@contextmanager
def _processes(layout: NamedLayout, config: RunConfig, store: Store, number: int) -> Iterator[None]:
    """A context in which the processes of `layout` have a process group.

    They meet in `store`, which all layouts use one after another; `number` counts its uses.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from dit.distributed.process_groups import start_processes

    mine, limit_s = PrefixStore(f"layout {number}", store), _limit_s(config.dist)
    if rank() == 0:
        mine.set("begins", "")
    mine.wait(["begins"], _TURN)
    dist.init_process_group(
        "nccl" if _devices() else "gloo",
        store=mine,
        rank=rank(),
        world_size=layout.size,
        timeout=timedelta(seconds=limit_s + 60),
    )
    start_processes(
        seed=config.rng.seed,
        model=config.model,
        dp_replicate_size=config.ddp.dp_replicate_size,
        limit_s=limit_s,
    )
    yield
    dist.destroy_process_group()


def _watching(layout: NamedLayout, config: RunConfig) -> AbstractContextManager[None]:
    """A context in which the watchdog ends the check, and names a process that hangs or dies."""
    from dit.distributed.watchdog.monitor import watchdog

    def say(message: str) -> None:
        say_once(
            f"layout {layout.name}, {training_name(config.model, config.objective)}: {message}"
        )

    return watchdog(limit_s=_limit_s(config.dist), say=say, again="")


def _limit_s(dist: DistConfig) -> float:
    return 60 * dist.distributed_timeout_minutes


def _packs(
    config: RunConfig, layout: NamedLayout, *, steps_of: Sequence[NamedLayout]
) -> list[PackedBatch]:
    """Packs for all steps, equal on all ranks of all layouts in `steps_of`."""
    from dit.data import build_train_loader
    from dit.sizing.flops import work_of_packs

    reader, count = reading(config, layout, steps_of=steps_of)
    loader = build_train_loader(
        reader, rank=0, world_size=1, work=work_of_packs(reader.model, reader.dataset)
    )
    packs = list(islice(loader, count))
    loader.close()
    return packs


def reading(
    config: RunConfig, layout: NamedLayout, *, steps_of: Sequence[NamedLayout]
) -> tuple[RunConfig, int]:
    """The configuration that reads the packs of `layout`, and the number of packs to read.

    All layouts in `steps_of` share these packs, so the one with most packs decides. Layouts of
    preference pairs have packs of their own.
    """
    reader = parse_layout(layout.reference).of(config) if layout.pairs else config
    return reader, STEPS * max(one.of(config).train.global_batch_size for one in steps_of)
