"""What is asked of the device of this process."""

from __future__ import annotations

import resource
from functools import cache

import torch

from dit.planner.devices import peak_flops


@cache
def peak_tflops() -> float | None:
    """TFLOP/s that its data sheet promises for bfloat16; None for what the table has not got."""
    flops = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if flops is None else flops / 1e12


def peak_memory_gb() -> float:
    """Since the start: on a GPU what torch has allocated, else the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
