"""Number of CPU threads for torch, on machines whose cores other programs also use.

torch's OpenMP reads its environment variables when it is loaded, so `dit` sets them at import.
Values that the user has set stay.
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
    """Sets OpenMP's variables in `environment`; this process may use `cores` cores.

    Idle threads are made to sleep. By default they poll for milliseconds; on a busy core a thread
    may poll while the thread it waits for cannot run: on two busy cores a network took 3 to 5 times
    as long. The number of threads does not follow the load, because sums depend on it, and a
    resumed run must be exact. If the folder `cgroup` limits this process to fewer CPUs than
    `cores`, there are as many threads as CPUs; torch would start one for each core.
    """
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    quota = cpu_quota(cgroup)
    if quota is not None and quota < cores:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, math.floor(quota))))


def about_threads(cgroup: Path, *, threads: int, cores: int, load: float) -> str | None:
    """A log line if a container limits the `threads`, or other programs share the cores; else None.

    `load` is the number of processes that wanted a core before the start (the first of
    `os.getloadavg`).
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
    """Number of CPUs that the container of this process may use; None without a limit."""
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
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
