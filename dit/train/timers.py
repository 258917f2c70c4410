"""Seconds spent in each part of a step.

A part inside another is subtracted from the outer one, so that no second counts twice. On a GPU the
host runs ahead of the device, so seconds are measured only after `synchronize_timers`, which makes
each part wait for the device at both ends; only benchmarks should do that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DATA, FORWARD, BACKWARD = "data", "forward", "backward"
COMMUNICATION, OPTIMIZER = "communication", "optimizer"
TIMED_PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
_seconds: dict[str, float] = dict.fromkeys(TIMED_PARTS, 0.0)
_inner = [0.0]  # seconds of the parts inside each part that is under way
_synchronized = False


def synchronize_timers() -> None:
    """Makes all timers wait for the device from now on."""
    global _synchronized
    _synchronized = True


@contextmanager
def timed(part: str) -> Iterator[None]:
    """A context or decorator whose seconds are added to `part`.

    After an error it adds nothing and does not wait for the device, because a collective with a
    failed rank would never end there.
    """
    began = _now()
    _inner.append(0.0)
    yield
    seconds = _now() - began
    _seconds[part] += seconds - _inner.pop()
    _inner[-1] += seconds


def elapsed() -> dict[str, float]:
    """Seconds of each part since the last call; empty on a GPU without `synchronize_timers`."""
    seconds = dict(_seconds)
    _seconds.update(dict.fromkeys(TIMED_PARTS, 0.0))
    return seconds if _synchronized or not torch.cuda.is_available() else {}


def _now() -> float:
    if _synchronized and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
