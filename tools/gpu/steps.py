"""Rows that measure: bounds, steps of a shape, their kernels, and a padded loop beside ours."""

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
from dit.models.cost import memory
from dit.models.recomputation import USABLE
from dit.train.attention_choice import with_attention
from tools.gpu.plan import PLAN, Row, keys_of
from tools.gpu.results import Outcome

_STEPS = {"full": (3, 10), "tiny": (1, 2)}  # warm-up, measured
_PROFILED = 3
_PACK = "dataset.task_encoder_seq_length="
# Of DiT-XL so many layers that batches padded to 16k tokens fit.
_PADDED = {
    "full": "--large --steps 3 --batch 8 model.name=dit_xl model.num_layers=4 model.precision=bf16",
    "tiny": "--steps 1 model.num_layers=1 model.hidden_size=48 model.crossattn_emb_size=16",
}


def table(row: Row, *, size: str, report: Callable[[Any], None], **_: Any) -> Outcome:
    """The bounds of a table."""
    return {"found": bounds(row.name, size=size, report=report)}


def padded_loop(_row: Row, *, size: str, **_: Any) -> Outcome:
    """What compare_padded.py finds."""
    return {"found": compare_padded.compare(_PADDED[size].split())}


def steps(row: Row, *, size: str, keys: Sequence[str], **_: Any) -> Outcome:
    """Medians and shares of the steps, as benchmark.py writes them, and what was expected."""
    found, losses = _measured(row, size, keys, count=_STEPS[size][1], around=nullcontext())
    tflops = found["model_tflops"]["median"]
    whole = whole_samples_per_s(row.shape, 1e12 * tflops)
    reserved = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0
    more = {"reserved_memory_gb": reserved, "whole_samples_per_s": whole}
    return {"found": found | {"losses": losses} | more}


def profile(row: Row, *, size: str, keys: Sequence[str], **_: Any) -> Outcome:
    """The longest kernels of a few steps, the time of all by their kind, and what was expected."""
    trace = torch.profiler.profile()
    found, _losses = _measured(row, size, keys, count=_PROFILED, around=trace)
    step_s = found["step_time_s"]["median"]
    told = {name: found[name] for name in ("attention_backend", "pack", "expected")}
    return {"found": kernel_times(kernels_of(trace), steps=_PROFILED, step_s=step_s) | told}


def _measured(
    row: Row, size: str, keys: Sequence[str], *, count: int, around: AbstractContextManager[Any]
) -> tuple[dict[str, Any], list[float]]:
    """What benchmark.py finds, with the kernel that ran, the pack and what was expected; losses."""
    torch.compiler.reset()
    config, pack = fitting_config(row, size, keys)
    with watched_processes(config):  # the kernel that the run takes, for the planner, too
        config, _notes = with_attention(config, timed=False)
    warm_up, _ = _STEPS[size]
    found, values = benchmark.measure(config, warm_up=warm_up, steps=count, around=around)
    backend = config.model.attention_backend
    if backend is AttentionBackend.AUTO:
        backend = AttentionBackend.SDPA  # nothing else is here
    found |= {"attention_backend": str(backend), "pack": pack}
    found["expected"] = expected_here(config, found["device"])
    return found, [one["loss"] for one in values]


def fitting_config(row: Row, size: str, more: Sequence[str] = ()) -> tuple[RunConfig, str]:
    """The configuration of a row, and a word about its packs where they are smaller than asked.

    All rows of a shape take as many quarters of its packs as fit the device in the one that needs
    most memory, so that they can be compared; a quarter is the least. Packs that the user asks for
    in `more` stay.
    """

    def of(one: Row, quarters: int) -> RunConfig:
        config = _config(one.shape, tuple(keys_of(one, size)), size, tuple(more))
        return _with_quarters(config, quarters)

    def need(quarters: int) -> int:
        alike = (of(one, quarters) for one in PLAN if one.shape == row.shape)
        return max(memory(config, world_size=1).total for config in alike)

    asked, room = of(row, 4), USABLE * (device_memory() or math.inf)
    if any(one.startswith(_PACK) for one in more) or need(4) <= room:
        return asked, ""
    fitting = of(row, next((quarters for quarters in (3, 2) if need(quarters) <= room), 1))
    tokens, wanted = (one.dataset.task_encoder_seq_length for one in (fitting, asked))
    return fitting, (
        f"packs of {tokens:,} tokens; with {wanted:,} a row of this shape needs about"
        f" {need(4) / 2**30:.0f} GiB of {room / 2**30:.0f}"
    )


@cache
def _config(shape: str, keys: tuple[str, ...], size: str, more: tuple[str, ...]) -> RunConfig:
    overrides = [*shape_keys(shape, size), *more, *keys]
    return benchmark.only_steps(load_config(default_config(), overrides=overrides))


def _with_quarters(config: RunConfig, quarters: int) -> RunConfig:
    """With packs of so many quarters, which still hold a sample."""
    packs = config.dataset
    least = max(config.mock_tokens(one) + one.text_length for one in packs.mock_samples)
    tokens = max(packs.task_encoder_seq_length * quarters // 4, least)
    tokens = min(
        tokens // packs.sample_multiple * packs.sample_multiple, packs.task_encoder_seq_length
    )
    return replace(config, dataset=replace(packs, task_encoder_seq_length=tokens))
