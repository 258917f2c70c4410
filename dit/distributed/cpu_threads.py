"""Threads of torch's arithmetic on a CPU that other programs use, too.

The variables are read once, when torch loads OpenMP, so `dit` sets them when it is imported. What
the environment says already stays as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
BY_USER = "OMP_NUM_THREADS" in os.environ
"""Whether the user, or a launcher of several processes, has set the number of threads."""


def choose_threads(environment: MutableMapping[str, str], cgroup: Path, *, cores: int) -> None:
    """Sets what OpenMP reads; `cores` are those that this process may run on.

    Threads without work sleep. By default they poll for milliseconds, and on a core that another
    program wants, one polls while the one that it waits for does not run: on two cores in use, a
    network took 3 to 5 times as long. The number of threads does not follow the load, because sums
    depend on it, and a run that continues is to be exact.

    torch starts a thread for each core, also in a container that may use fewer at a time.
    """
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    quota = cpu_quota(cgroup)
    if quota is not None and quota < cores:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, math.floor(quota))))


def about_threads(cgroup: Path, *, threads: int, cores: int, load: float) -> str | None:
    """A line for the log where a container limits the threads, or programs share their cores.

    None where neither is so. `load` is how many processes wanted a core before the start (the first
    of `os.getloadavg`).
    """
    quota = cpu_quota(cgroup)
    if quota is not None and quota < cores:
        why = f"because this container may use {quota:g} of {cores} cores"
    elif threads > 1 and threads + load > cores + 0.5:
        why = f"on {cores} cores, of which other programs use about {min(load, cores):.1f}"
    else:
        return None
    count = "1 CPU thread" if threads == 1 else f"{threads} CPU threads"
    return f"computes with {count}, {why} (OMP_NUM_THREADS sets another number)"


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
