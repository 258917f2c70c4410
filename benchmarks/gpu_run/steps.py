"""A configuration of a shape -> measured steps; the kernels that take most of their time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import benchmark
import compare_padded
import torch
from torch.profiler import DeviceType

from dit.config import RunConfig
from dit.config_loading import default_config, load_config
from dit.distributed.process_groups import device_memory
from dit.models.stacks.frozen_blocks import ByteRows
from gpu_run.expected import expected_here, with_fitting_pack
from gpu_run.parts import PADDED_LOOP, Part, configuration
from gpu_run.schedule import Outcome

_STEPS = {"full": (3, 10), "tiny": (1, 2)}  # warm-up, measured
_PROFILED = 3
_KERNELS = 10
_KINDS = {
    "communication": r"nccl|multimem",
    "attention": r"flash|fmha|sdpa|attention|attn",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|splitk|wgmma|\bmm\b|addmm|matmul",
    "norms, rotation, dropout": r"gated_norm|rotated_heads|across_heads|adapter_dropout|"
    r"layer_?norm|rms_?norm",
    "optimizer": r"adam|multi_tensor",
    "copies": r"memcpy|memset|copy",
}
"""Kernels by their names; the first that matches. Attention comes before products, since names of
its kernels say CUTLASS as well."""
OTHER = "everything else"


def steps(part: Part, *, size: str, keys: Sequence[str], **_: Any) -> Outcome:
    """Medians and shares of the steps, as benchmark.py writes them, and what was expected."""
    warm_up, count = _STEPS[size]
    config, pack = _config(part, size, keys)
    found, values = benchmark.measure(
        config, warm_up=warm_up, steps=count, around=nullcontext(), fill=fill_on_device
    )
    expected = expected_here(config, found["device"])
    losses = [one["loss"] for one in values]
    return {"found": found | {"losses": losses, "expected": expected, "smaller_pack": pack}}


def profile(part: Part, *, size: str, keys: Sequence[str], **_: Any) -> Outcome:
    """The longest kernels of a few steps, the time of all by their kind, and what was expected."""
    config, pack = _config(part, size, keys)
    trace = torch.profiler.profile()
    found, _values = benchmark.measure(
        config, warm_up=_STEPS[size][0], steps=_PROFILED, around=trace, fill=fill_on_device
    )
    on_gpu = torch.cuda.is_available()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times: dict[str, tuple[float, int]] = {}
    for event in trace.key_averages():
        # Compared by ==, since `is` finds no two of torch's device types the same.
        if event.device_type == wanted and not event.is_user_annotation:
            seconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            times[event.key] = (seconds / 1e6, event.count)
    step_s = found["step_time_s"]["median"]
    kernels = kernel_times(times, steps=_PROFILED, step_s=step_s)
    expected = expected_here(config, found["device"])
    return {"found": kernels | {"expected": expected, "smaller_pack": pack}}


def kernel_times(
    times: dict[str, tuple[float, int]], *, steps: int, step_s: float
) -> dict[str, Any]:
    """From seconds and calls of each kernel: the longest, and all by kind, of one step."""
    by_kind: dict[str, float] = defaultdict(float)
    for name, (seconds, _) in times.items():
        by_kind[kind_of(name)] += seconds / steps
    rows = [
        {"name": name, "seconds": seconds / steps, "calls": calls / steps}
        for name, (seconds, calls) in sorted(times.items(), key=lambda one: -one[1][0])
    ]
    return {
        "step_s": step_s,
        "kernels_s": sum(by_kind.values()),
        "by_kind_s": dict(by_kind),
        "longest": rows[:_KERNELS],
        "of_no_kind": [row for row in rows if kind_of(row["name"]) == OTHER][:_KERNELS],
    }


def kind_of(kernel: str) -> str:
    kinds = (kind for kind, names in _KINDS.items() if re.search(names, kernel, re.IGNORECASE))
    return next(kinds, OTHER)


def padded_loop(_part: Part, *, size: str, **_: Any) -> Outcome:
    """What compare_padded.py finds."""
    return {"found": compare_padded.compare(PADDED_LOOP[size])}


def _config(part: Part, size: str, more: Sequence[str]) -> tuple[RunConfig, str]:
    """The configuration of a part, and why its packs are smaller than planned.

    Those that the user asks for stay.
    """
    torch.compiler.reset()
    overrides = configuration(part, size, more=more)
    config = benchmark.only_steps(load_config(default_config(), overrides=overrides))
    if any(one.startswith("dataset.task_encoder_seq_length=") for one in more):
        return config, ""
    return with_fitting_pack(config, device_memory())


def fill_on_device(model: torch.nn.Module, config: RunConfig) -> None:
    """Random weights of moderate size, drawn on the device: no step is faster for its zeros.

    The values that training starts from are drawn one after the other on the host.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(config.rng.seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.fill_(1)
            elif weight.dtype is torch.uint8:  # rows of a matrix in 8 bits, each with its factor
                rows: Any = weight.to_local()  # type: ignore[operator]  # a DTensor
                drawn = torch.empty_like(rows[:, 1:], dtype=torch.float32)
                rows.copy_(ByteRows().pack(drawn.normal_(std=0.02, generator=generator)))
            else:
                weight.normal_(std=0.02, generator=generator)
