"""How fast this device multiplies matrices."""

from __future__ import annotations

import time
from statistics import median

import torch


def measured_flops(device: torch.device, dtype: torch.dtype, *, repeats: int = 7) -> float:
    """Operations a second of a large square product, median."""
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
