"""Where fused kernels run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def kernels_run_on(device: torch.device) -> bool:
    """Whether tensors on `device` go through the kernels: with CUDA and Triton."""
    return device.type == "cuda" and _usable(device)


@cache
def _usable(device: torch.device) -> bool:
    """Older GPUs than Ampere (8.0) have no bfloat16, and Triton refuses it there."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
