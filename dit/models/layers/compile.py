"""torch.compile for the element-wise work between matrix products (`model.compile`)."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` as a fused kernel, compiled once for packs of all sizes."""
    made: Any = torch.compile(function, dynamic=True)
    return made


def check_compiler() -> None:
    """Checks that torch.compile can make kernels on this machine.

    Raises:
        ValueError: there is no C++ compiler or no Python.h, which kernels of CPUs and of GPUs need.
    """
    if missing := missing_for_compilation():
        raise ValueError(
            "model.compile=true needs a C++ compiler and Python's headers, and there is no"
            f" {missing} here; install it (Debian: g++ and python3-dev), or set model.compile=false"
        )


def missing_for_compilation() -> str:
    """What torch.compile needs and this machine lacks; empty where it lacks nothing."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(shutil.which(name) for name in wanted if name):
        return "g++, clang++ or $CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else str(header)
