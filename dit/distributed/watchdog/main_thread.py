"""Reports of the main thread to the watchdog: its activity, and the thread it waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist


class PeerError(ConnectionError):
    """Another process has failed, so that this one cannot go on.

    The message is empty if the other process shows the cause.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """The activity of the main thread as a phrase, and its step."""

    what: str = "start"
    step: int = 0
    marks: int = 0  # calls of `heartbeat` in this step


class MainThread:
    """The activity of the main thread, for the watchdog's threads to read."""

    activity = Activity()
    waits_for: threading.Thread | None = None  # the thread that works in its place


def heartbeat(what: str, *, step: int | None = None) -> None:
    """Reports that the main thread begins the activity `what`.

    The first call in a step gives `step`. At most `dist.distributed_timeout_minutes` may pass
    between two calls.
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
    """A context in which the watchdog reports what `thread` does, instead of the main thread."""
    MainThread.waits_for = thread
    try:
        yield
    finally:
        MainThread.waits_for = None


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether `error`, of gloo or NCCL, means that another process ended without a message."""
    if error is None:
        return False
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return gloo or isinstance(error, dist.DistError) or is_lost_peer(error.__cause__)
