"""Measured steps -> medians, shares and MFU; and the measured peak of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dit.config import RunConfig
from dit.distributed.device_specs import peak_flops
from dit.distributed.process_groups import device
from dit.models.layers.parallel_linear import dtype
from dit.train.metrics.step_metrics import TIMED_PARTS

_SPREAD = ("tokens_per_s", "samples_per_s", "pack_fill", "model_tflops")


def step_summary(config: RunConfig, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians, 5th and 95th percentiles under the names of metrics.jsonl; called by all ranks.

    `shares` are parts of the sum of all steps, because shares of medians do not add up to 1.
    """
    parts = [f"{part}_s" for part in TIMED_PARTS]
    other = [step["step_time_s"] - sum(step[part] for part in parts) for step in steps]
    values = {name: [step[name] for step in steps] for name in ("step_time_s", *parts, *_SPREAD)}
    values["other_s"] = other
    found: dict[str, Any] = {name: spread_of(numbers) for name, numbers in values.items()}
    whole = fmean(values["step_time_s"])
    found["shares"] = {part: fmean(values[part]) / whole for part in (*parts, "other_s")}
    found["peak_tflops"] = _peaks(config)
    tflops = found["model_tflops"]["median"]
    found["mfu"] = {kind: tflops / peak for kind, peak in found["peak_tflops"].items()}
    found["peak_memory_gb"] = _of_fullest(steps[-1]["peak_memory_gb"])
    return {"device": _name(), "processes": dist.get_world_size()} | found


def spread_of(numbers: Sequence[float]) -> dict[str, float]:
    p5, middle, p95 = np.percentile(numbers, [5, 50, 95]).tolist()
    return {"median": middle, "p5": p5, "p95": p95}


def _peaks(config: RunConfig) -> dict[str, float]:
    """TFLOP/s of one device: from its data sheet, if the table has it, and measured."""
    kind = dtype(config.model)
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


def measured_flops(device: torch.device, dtype: torch.dtype, *, repeats: int = 7) -> float:
    """Median FLOP/s of a large square matrix product."""
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: torch.mm(a, b), device, repeats=repeats)


def median_seconds(
    function: Callable[[], object], device: torch.device, *, repeats: int = 7
) -> float:
    """Median time of a call that fills the device, after two other calls."""
    seconds = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        function()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
