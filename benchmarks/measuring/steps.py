"""Summarizes measured steps as medians, shares and MFU; measures the peak of the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dit.config import ModelConfig, RunConfig
from dit.device_specs import peak_flops
from dit.distributed.cuda_environment import set_cuda_environment
from dit.distributed.entry import say_once
from dit.distributed.process_groups import device, start_processes
from dit.distributed.watchdog.monitor import watchdog
from dit.models.layers.parallel_linear import dtype
from dit.train.timers import TIMED_PARTS

_TILE = 1 << 24
_SPREAD = ("tokens_per_s", "samples_per_s", "pack_fill", "model_tflops")


@contextmanager
def watched_processes(config: RunConfig) -> Iterator[None]:
    """Context that initializes the process groups of a run's layout and runs its watchdog.

    All ranks must enter it. The process groups remain when it ends.
    """
    limit_s = 60 * config.dist.distributed_timeout_minutes
    set_cuda_environment(config)
    start_processes(
        seed=config.rng.seed,
        model=config.model,
        dp_replicate_size=config.ddp.dp_replicate_size,
        limit_s=limit_s,
    )
    with watchdog(limit_s=limit_s, say=say_once, again=""):
        yield


def fill_on_device(model: torch.nn.Module, seed: int) -> None:
    """Fills the weights of `model` in place: matrices with small random numbers, vectors with ones.

    Zeros could make a step faster. Matrices repeat one tile of numbers, because drawing 12B numbers
    on a host takes minutes.
    """
    place = next(model.parameters()).device
    generator = torch.Generator(place).manual_seed(seed)
    tile = torch.empty(_TILE, device=place).normal_(std=0.02, generator=generator)
    with torch.no_grad():
        for weight in model.parameters():
            numbers = weight.to_local() if isinstance(weight, DTensor) else weight
            if numbers.dim() == 1 or not numbers.is_floating_point():
                numbers.fill_(1)
                continue
            drawn = tile.repeat(-(-numbers.numel() // _TILE))[: numbers.numel()]
            numbers.copy_(drawn.view_as(numbers))


def step_summary(model: ModelConfig, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summary of measured steps, as a dict; all ranks must call it.

    Metrics have their names of metrics.jsonl, with the median and the 5th and 95th percentile of
    each. `shares` are parts of the mean step time, because shares of medians do not add up to 1.
    Further keys are peak_tflops, mfu, peak_memory_gb, device and processes.
    """
    parts = [f"{part}_s" for part in TIMED_PARTS]
    other = [step["step_time_s"] - sum(step[part] for part in parts) for step in steps]
    values = {name: [step[name] for step in steps] for name in ("step_time_s", *parts, *_SPREAD)}
    values["other_s"] = other
    found: dict[str, Any] = {name: spread_of(numbers) for name, numbers in values.items()}
    whole = fmean(values["step_time_s"])
    found["shares"] = {part: fmean(values[part]) / whole for part in (*parts, "other_s")}
    found["peak_tflops"] = _peaks(model)
    tflops = found["model_tflops"]["median"]
    found["mfu"] = {kind: tflops / peak for kind, peak in found["peak_tflops"].items()}
    found["peak_memory_gb"] = _of_fullest(steps[-1]["peak_memory_gb"])
    return {"device": _name(), "processes": dist.get_world_size()} | found


def spread_of(numbers: Sequence[float]) -> dict[str, float]:
    p5, middle, p95 = np.percentile(numbers, [5, 50, 95]).tolist()
    return {"median": middle, "p5": p5, "p95": p95}


def _peaks(model: ModelConfig) -> dict[str, float]:
    """Peak TFLOP/s of one device: from its data sheet, if the table has it, and as measured."""
    kind = dtype(model)
    measured = measured_flops(device(), kind)
    promised = peak_flops(_name())
    found = {"data sheet, bfloat16": promised} if promised else {}
    found[f"measured, {str(kind).removeprefix('torch.')}"] = measured
    return {name: flops / 1e12 for name, flops in found.items()}


def _name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _of_fullest(own: float) -> float:
    found = torch.tensor(own, dtype=torch.float64, device=device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product of type `dtype` on `device`."""
    side = 8192 if device.type == "cuda" else 1024
    pairs = [torch.randn(2, side, side, device=device).to(dtype) for _ in range(2)]
    calls = [partial(torch.mm, *pair) for pair in pairs]
    return 2 * side**3 / call_seconds(calls, device)


def call_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, *, least: float = 0.05
) -> float:
    """Mean seconds of one call, from rounds of all `calls` that take at least `least` seconds.

    The device's own clock measures them, so that the start of a call is hidden behind the call
    before, as in a step. A first round, which may compile them, is not counted.
    """
    for call in calls:
        call()
    turns = 1
    while (taken := _seconds(calls, turns, device)) < least:
        turns = math.ceil(turns * min(100, 1.2 * least / max(taken, 1e-9)))
    return taken / turns / len(calls)


def _seconds(calls: Sequence[Callable[[], object]], turns: int, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        _run(calls, turns)
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    _run(calls, turns)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _run(calls: Sequence[Callable[[], object]], turns: int) -> None:
    for _ in range(turns):
        for call in calls:
            call()
