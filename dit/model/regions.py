"""Regions between matrix products that `model.compile` fuses into one kernel each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def region(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, compiled once for packs of all sizes."""
    made: Any = torch.compile(function, dynamic=True)
    return made


def check_compiler() -> None:
    """Refuses to begin what cannot be compiled.

    Raises:
        ValueError: there is no C++ compiler, which kernels of CPUs and of GPUs are built with.
    """
    wanted = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(shutil.which(name) for name in wanted if name):
        raise ValueError(
            "model.compile=true needs a C++ compiler, and there is no g++, clang++ or $CXX here;"
            " install one (Debian: g++), or set model.compile=false"
        )
