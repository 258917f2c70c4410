"""Regions between matrix products that `model.compile` fuses into one kernel each."""

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
def region(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, compiled once for packs of all sizes."""
    made: Any = torch.compile(function, dynamic=True)
    return made


def check_compiler() -> None:
    """Refuses to begin what cannot be compiled.

    Raises:
        ValueError: there is no C++ compiler or no Python.h, which kernels of CPUs and of GPUs need.
    """
    if missing := missing_for_compilation():
        raise ValueError(
            "model.compile=true needs a C++ compiler and Python's headers, and there is no"
            f" {missing} here; install it (Debian: g++ and python3-dev), or set model.compile=false"
        )


def missing_for_compilation() -> str:
    """What torch.compile lacks on this machine; empty where it has all."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(shutil.which(name) for name in wanted if name):
        return "g++, clang++ or $CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else str(header)
