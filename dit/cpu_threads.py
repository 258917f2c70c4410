"""Threads of torch's arithmetic on a CPU that other programs use, too.

The variables are read once, when torch loads OpenMP, so `dit` sets them when it is imported. What
the environment says already stays as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

SPINS = 1000
"""How long a thread of GNU's OpenMP polls for its next part before it sleeps.

It is the library's own number where it has more threads than cores. Its other number, 300,000,
takes milliseconds: on a core that another program wants, a thread polls while the one that it
waits for does not run. Sampling on two shared cores was 28 to 80 times slower with it than with
one thread, and is as fast as before with this one, as it is on a machine with nothing else to do.
"""


def choose_threads(environment: MutableMapping[str, str], cgroup: Path, *, cores: int) -> None:
    """Sets what OpenMP reads; `cores` are those that this process may run on.

    torch starts a thread for each of them, also in a container that may use fewer at a time.
    """
    environment.setdefault("GOMP_SPINCOUNT", str(SPINS))
    quota = cpu_quota(cgroup)
    if quota is not None and quota < cores:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, math.floor(quota))))


def cpu_quota(cgroup: Path) -> float | None:
    """CPUs that the container of this process may use; None without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()  # cgroup v2
    except (OSError, ValueError):
        try:
            limit, period = (
                (cgroup / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        except OSError:
            return None
    try:
        quota = float(limit) / float(period)  # of v2: "max 100000"; of v1: -1
    except (ValueError, ZeroDivisionError):
        return None
    return quota if quota > 0 else None


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
