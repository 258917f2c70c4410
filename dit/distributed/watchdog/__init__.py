"""No process waits for ever for another one that has died or stands still.

The main thread calls `heartbeat` with what it begins; inside `watchdog`, threads of all processes
tell each other, and end the run where one is silent for too long.

monitor    the threads of one process: they report, judge, and end the process
verdict    reports of all processes -> which one has died, or holds up the others
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

AGAIN = "Started again, the run goes on from its last checkpoint"


class PeerError(ConnectionError):
    """Another process keeps this one from going on. It is empty where that one says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What the main thread does."""

    what: str = "start"
    step: int = 0
    marks: int = 0  # calls of `heartbeat` in this step


class MainThread:
    """What the main thread tells the monitor."""

    activity = Activity()
    waits_for: threading.Thread | None = None  # the thread that works in its place


def heartbeat(what: str, *, step: int | None = None) -> None:
    """Says what the main thread begins; the first call in a step gives the step's number.

    No more than `dist.distributed_timeout_minutes` may pass between two calls.
    """
    old = MainThread.activity
    new_step = step is not None and step != old.step
    MainThread.activity = Activity(
        what=what,
        step=old.step if step is None else step,
        marks=0 if new_step else old.marks + 1,
    )


@contextmanager
def waiting_for(thread: threading.Thread) -> Iterator[None]:
    """Inside, the main thread waits for `thread`, whose place in the code is reported instead."""
    MainThread.waits_for = thread
    try:
        yield
    finally:
        MainThread.waits_for = None


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether gloo or NCCL says that another process is gone, which could not say so itself."""
    if error is None:
        return False
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return gloo or isinstance(error, dist.DistError) or is_lost_peer(error.__cause__)


@contextmanager
def watchdog(*, limit_s: float, say: Callable[[str], None], again: str = AGAIN) -> Iterator[None]:
    """Inside, a process that dies, or stands still for `limit_s`, ends all processes of the run.

    `say` shows a message unless another process has shown one; `again` is its last
    sentence, on what becomes of the run. Without a launcher there is one process and no watchdog.

    Raises:
        PeerError: instead of the error of a broken connection; it names the rank that broke it.
    """
    if "RANK" not in os.environ:
        yield
        return
    from dit.distributed.entry import shown_at_once
    from dit.distributed.watchdog.monitor import Monitor

    monitor = Monitor(limit_s=limit_s, say=say, again=again)
    try:
        with shown_at_once():  # while there is a store that tells which process is the first
            yield
        heartbeat("end")
        dist.barrier()  # a process that leaves before the others looks dead
    except BaseException as error:
        monitor.explain(error)
        raise
    finally:
        monitor.stop()
