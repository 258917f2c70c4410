"""A run in miniature, which one of its ranks breaks: `faulty_run.py FAULT RANK LIMIT_S`.

Steps are marks and an all-reduce. It spares the seconds that Megatron-Core and a loader take.
Where nobody has set RANK it forks all ranks, which then share the seconds of torch's import.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dit.distributed.entry import StopSignals, run, say_once
from dit.distributed.watchdog import heartbeat
from dit.distributed.watchdog.monitor import Monitor, watchdog
from dit.distributed.watchdog.verdict import Verdict
from dit.launched import meet

FAULTY_STEP, LAST_STEP = 20, 40
LATE_S = 2.5
"""More than the rounds of the watchdog that a test has."""


def _hang() -> None:
    while True:
        time.sleep(1)


def _fail() -> None:
    raise ValueError("a reason of its own")


FAULTS = {
    "none": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "late": _hang,
    "fail": _fail,
}


def train(fault: str, faulty_rank: int) -> int:
    """Takes its steps, and has a child process as a trainer has its loaders."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        for step in range(1, LAST_STEP + 1):
            heartbeat("read of packs", step=step)
            if (step, dist.get_rank()) == (FAULTY_STEP, faulty_rank):
                if fault == "kill":  # a loader ends by itself
                    child.kill()
                FAULTS[fault]()
            heartbeat("forward and backward pass")
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05)
    finally:
        child.kill()
    return 0


def _read_late() -> None:
    """Rank 1 hears of the verdict, and asks whether to show it, as late as on a loaded machine."""
    judge, show = Monitor._judge, Monitor._show

    def late_judge(monitor: Monitor) -> None:
        time.sleep(LATE_S)
        judge(monitor)

    def late_show(monitor: Monitor, verdict: Verdict) -> None:
        time.sleep(LATE_S)
        show(monitor, verdict)

    Monitor._judge, Monitor._show = late_judge, late_show


def main() -> int:
    """As pretrain_dit.py starts and watches its processes."""
    fault, rank, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    timeout = timedelta(seconds=limit_s + 60)
    here, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=meet(timeout), rank=here, world_size=size, timeout=timeout
    )
    if fault == "late" and here == 1:
        _read_late()
    with watchdog(limit_s=limit_s, say=say_once), StopSignals():
        return train(fault, rank)


def fork_ranks() -> int:
    """Forks as many ranks as WORLD_SIZE says; 0 if one of them ends with 0."""
    children = []
    for rank in map(str, range(int(os.environ["WORLD_SIZE"]))):
        if not (child := os.fork()):
            os.environ.update(RANK=rank, LOCAL_RANK=rank)
            sys.exit(run(main))
        children.append(child)
    return int(all([os.waitpid(child, 0)[1] for child in children]))


if __name__ == "__main__":
    sys.exit(run(main) if "RANK" in os.environ else fork_ranks())
