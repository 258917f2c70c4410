"""Sums the kernels of a profile: the longest, and the time of all by their kind."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import DeviceType

_LONGEST = 10
_KINDS = {
    "communication": r"nccl|multimem",
    "attention": r"flash|fmha|sdpa|attention|attn",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|splitk|wgmma|\bmm\b|addmm|matmul",
    "norms, rotation, dropout": r"gated_norm|rotated_heads|across_heads|adapter_dropout|"
    r"layer_?norm|rms_?norm",
    "optimizer": r"adam|multi_tensor",
    "copies": r"memcpy|memset|copy",
}
"""Patterns of kernel names for each kind; the first that matches counts. Attention comes before
products, because names of its kernels contain CUTLASS as well."""
OTHER = "everything else"


def kernels_of(trace: torch.profiler.profile) -> dict[str, tuple[float, int]]:
    """Total time of the kernels in `trace`, as {kernel name: (seconds, calls)}.

    Without a GPU the entries are the CPU's operations.
    """
    on_gpu, times = torch.cuda.is_available(), dict[str, tuple[float, int]]()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    for event in trace.key_averages():
        # Compared by ==, since `is` finds no two of torch's device types the same.
        if event.device_type == wanted and not event.is_user_annotation:
            seconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            times[event.key] = (seconds / 1e6, event.count)
    return times


def kernel_times(
    times: dict[str, tuple[float, int]], *, steps: int, step_s: float
) -> dict[str, Any]:
    """Summary of kernel times for one step, as a dict for the JSON report.

    `by_kind_s` has seconds by kind of kernel, `kernels_s` their sum, `longest` the longest kernels,
    and `of_no_kind` the longest ones that no pattern matches.

    `times` has (seconds, calls) by kernel, for `steps` steps together. `step_s` is the duration of
    a step, copied into the result.
    """
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
        "longest": rows[:_LONGEST],
        "of_no_kind": [row for row in rows if kind_of(row["name"]) == OTHER][:_LONGEST],
    }


def kind_of(kernel: str) -> str:
    kinds = (kind for kind, names in _KINDS.items() if re.search(names, kernel, re.IGNORECASE))
    return next(kinds, OTHER)
