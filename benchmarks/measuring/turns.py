"""Measures two runs by turns, in one launch: their steps, and the ratios.

1. turns    of each round: every run is built anew, warmed up, measured, freed
2. ratios   of the second run to the first within a round, so that other load affects both alike;
            medians of all rounds

Both start from the same weights and, if they have as many data ranks, read the same packs: their
last losses then differ only by rounding.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from dit.config import RunConfig
from dit.console import Console
from dit.distributed.collective_errors import on_all_ranks
from dit.distributed.process_groups import process_groups
from dit.train.trainer import measure_steps
from measuring.steps import watched_processes

Figures = dict[str, float]


def take_turns(
    runs: Mapping[str, RunConfig], *, rounds: int, **measured: Any
) -> dict[str, list[Figures]]:
    """Runs each of `runs` once in every round; returns a list of figures, one per round, by name.

    `measured` are further arguments of `measure_steps`. All ranks must call it.
    """
    turns: dict[str, list[Figures]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, config in runs.items():
            turns[name].append(_turn(config, **measured))
    return turns


def _turn(config: RunConfig, **measured: Any) -> Figures:
    """Builds and measures a run; returns medians of its steps, CPU seconds a step, and peak memory.

    CPU seconds are those of all processes. The memory, in GB, is that of the fullest GPU, or 0
    without GPUs.
    """
    on_gpu, user_s = torch.cuda.is_available(), []
    with watched_processes(config):
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        values = measure_steps(config, around=_user_seconds(user_s), **measured)
        peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
        found = on_all_ranks(lambda: (user_s[0], peak))
    _leave_groups()
    return {
        "step_time_s": median(one["step_time_s"] for one in values),
        "tokens_per_s": median(one["tokens_per_s"] for one in values),
        "user_cpu_s": sum(seconds for seconds, _ in found) / len(values),
        "peak_memory_gb": max(gb for _, gb in found),
        "last_loss": values[-1]["loss"],
    }


@contextmanager
def _user_seconds(found: list[float]) -> Iterator[None]:
    """Appends to `found` the CPU seconds that user code of this process takes in the context."""
    began = os.times().user
    yield
    found.append(os.times().user - began)


def _leave_groups() -> None:
    """Destroys the process groups of a turn, whose communicators hold GPU memory."""
    groups = [g for g in vars(process_groups()).values() if isinstance(g, dist.ProcessGroup)]
    for group in {id(group): group for group in groups}.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def print_turns(turns: Mapping[str, Sequence[Figures]]) -> None:
    """Prints a table of medians of steps, and the ratios of the second run to the first."""
    first, other = turns.values()
    table = Table(title=f"A step, medians of {len(first)} rounds", title_justify="left")
    for name in ("", *turns, "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for name in first[0]:
        both: list[Any] = [[turn[name] for turn in each] for each in (first, other)]
        if not all(both[0]):  # the memory of a CPU's process never shrinks
            continue
        ratio = median(b / a for a, b in zip(*both, strict=True))
        table.add_row(name, *(f"{median(each):,.4g}" for each in both), f"{ratio:.3f}")
    Console().print(table)
