"""torch.compile with a cache for this processor only, and a check of the compiler it needs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_PREFIX = "cpu_"


def compile_here(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns `torch.compile(function, **options)`, which never uses another processor's kernels.

    Inductor builds C++ kernels for the present processor (`-march=native`) and caches them in
    `TORCHINDUCTOR_CACHE_DIR` under names that do not mention it. If that folder is shared, or its
    disk moves to another machine, a process would end with an illegal instruction. So this function
    sets `TORCHINDUCTOR_CACHE_DIR` to a subfolder for each model of processor.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    if folder.name.startswith(_PREFIX):  # of the parent process
        folder = folder.parent
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / _name_of_processor())
    return torch.compile(function, **options)


@cache
def _name_of_processor() -> str:
    """`_PREFIX` plus a digest of the processor's model and its usable instructions."""
    described = {torch.backends.cpu.get_cpu_capability()}  # also that of ATEN_CPU_CAPABILITY
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text().splitlines():
            if line.split(":")[0].strip() in ("model name", "flags", "CPU part", "Features"):
                described.add(line)
    digest = hashlib.blake2b("\n".join(sorted(described)).encode(), digest_size=6)
    return f"{_PREFIX}{digest.hexdigest()}"


def check_compiler() -> None:
    """Checks that torch.compile can build kernels on this machine.

    Raises:
        ValueError: a C++ compiler or Python.h is missing; kernels for CPUs and GPUs need both.
    """
    if missing := missing_for_compilation():
        raise ValueError(
            "model.compile=true needs a C++ compiler and Python's headers, but this machine has no"
            f" {missing}. Install it (Debian: g++ and python3-dev), or set model.compile=false"
        )


def missing_for_compilation() -> str:
    """What this machine lacks for torch.compile, such as the path of `Python.h`; "" if nothing."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(shutil.which(name) for name in wanted if name):
        return "g++, clang++ or $CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else str(header)
