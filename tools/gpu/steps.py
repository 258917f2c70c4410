"""Functions of rows that measure: bounds, steps of a shape, their kernels, a padded loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import benchmark
import compare_padded
import torch
from expected_step import expected_here, whole_samples_per_s
from measuring.bounds import bounds
from measuring.kernels import kernel_times, kernels_of
from measuring.shapes import shape_keys
from measuring.steps import watched_processes

from dit.config import AttentionBackend, RunConfig
from dit.config_loading import default_config, load_config
from dit.distributed.process_groups import device_memory
from dit.sizing.memory import memory
from dit.sizing.recomputation import USABLE
from dit.train.attention_choice import with_attention
from tools.gpu.plan import PLAN, Row

_STEPS = {"full": (3, 10), "tiny": (1, 2)}  # warm-up, measured
_PROFILED = 3
_PACK = "dataset.task_encoder_seq_length="
# DiT-XL with few layers, so that batches padded to 16k tokens fit.
_PADDED = {
    "full": "--large --steps 3 --batch 8 model.name=dit_xl model.num_layers=4 model.precision=bf16",
    "tiny": "--steps 1 model.num_layers=1 model.hidden_size=48 model.crossattn_emb_size=16",
}


def table(row: Row, *, size: str, report: Callable[[Any], None], **_: Any) -> None:
    """Reports the measured bounds of the table that the row names."""
    bounds(row.name, size=size, report=report)


def padded_loop(_row: Row, *, size: str, report: Callable[[Any], None], **_: Any) -> None:
    """Reports the figures of compare_padded.py, by the mixture of samples."""
    report({one["samples"]: one for one in compare_padded.compare(_PADDED[size].split())})


def steps(row: Row, *, size: str, keys: Sequence[str], report: Callable[[Any], None]) -> None:
    """Measures a row's steps with benchmark.py; reports medians, and what the planner expects."""
    found = _measured(row, size, keys, count=_STEPS[size][1], around=nullcontext())
    on_gpu, tflops = torch.cuda.is_available(), found["model_tflops"]["median"]
    found["reserved_memory_gb"] = torch.cuda.max_memory_reserved() / 1e9 if on_gpu else 0.0
    found["whole_samples_per_s"] = whole_samples_per_s(row.shape, 1e12 * tflops)
    report(found)


def profile(row: Row, *, size: str, keys: Sequence[str], report: Callable[[Any], None]) -> None:
    """Profiles some steps of a row; reports the longest kernels, and the time by kind of kernel.

    What the planner expects is reported, too.
    """
    trace = torch.profiler.profile()
    found = _measured(row, size, keys, count=_PROFILED, around=trace)
    step_s = found["step_time_s"]["median"]
    told = {name: found[name] for name in ("attention_backend", "pack", "expected")}
    report(kernel_times(kernels_of(trace), steps=_PROFILED, step_s=step_s) | told)


def _measured(
    row: Row, size: str, keys: Sequence[str], *, count: int, around: AbstractContextManager[Any]
) -> dict[str, Any]:
    """Measures `count` steps of a row in the context `around`; returns figures by name.

    They are the summary of benchmark.py, the losses, the attention kernel, a note about the pack,
    and what the planner expects.
    """
    torch.compiler.reset()
    config, pack = fitting_config(row, size, keys)
    with watched_processes(config):  # the kernel that the run takes, for the planner, too
        config, _notes = with_attention(config, timed=False)
    found, values = benchmark.measure(config, warm_up=_STEPS[size][0], steps=count, around=around)
    backend = config.model.attention_backend
    if backend is AttentionBackend.AUTO:
        backend = AttentionBackend.SDPA  # nothing else is here
    found |= {"losses": [one["loss"] for one in values], "attention_backend": str(backend)}
    return found | {"pack": pack, "expected": expected_here(config, found["device"])}


def fitting_config(row: Row, size: str, more: Sequence[str] = ()) -> tuple[RunConfig, str]:
    """Returns (configuration of the row, note on packs that are smaller than planned, or "").

    All rows of a shape take the same number of quarters of its pack, so that they can be compared:
    as many as fit the device in the row that needs most memory, and at least one. The size of packs
    that the user sets in `more` is kept.
    """

    def need(quarters: int) -> int:
        alike = (_config(one, size, quarters, *more) for one in PLAN if one.shape == row.shape)
        return max(memory(config, world_size=1).total for config in alike)

    asked, room = _config(row, size, 4, *more), USABLE * (device_memory() or math.inf)
    if any(one.startswith(_PACK) for one in more) or need(4) <= room:
        return asked, ""
    quarters = next((some for some in (3, 2) if need(some) <= room), 1)
    fitting = _config(row, size, quarters, *more)
    tokens, wanted = (one.dataset.task_encoder_seq_length for one in (fitting, asked))
    return fitting, (
        f"packs of {tokens:,} tokens; with {wanted:,} a row of this shape needs about"
        f" {need(4) / 2**30:.0f} GiB of {room / 2**30:.0f}"
    )


@cache
def _config(row: Row, size: str, quarters: int, *more: str) -> RunConfig:
    """The configuration of a row with packs of `quarters` quarters of the planned size.

    A pack is at least as large as the longest sample.
    """
    overrides = [*shape_keys(row.shape, size), *more, *row.keys(size)]
    config = benchmark.only_steps(load_config(default_config(), overrides=overrides))
    packs = config.dataset
    whole, step = packs.task_encoder_seq_length, packs.sample_multiple
    least = max(config.mock_tokens(one) + one.text_length for one in packs.mock_samples)
    tokens = min(max(whole * quarters // 4, least) // step * step, whole)
    return replace(config, dataset=replace(packs, task_encoder_seq_length=tokens))
