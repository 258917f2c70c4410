"""Where the seconds of a step go: parts say when they begin and end, the step reads the sums.

A part inside another is taken out of the outer one, so that no second counts twice. On a GPU the
host runs ahead of the device: then parts are timed only where `precisely` was called, by waiting
for the device, which a run that is not a measurement should not do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

DATA, FORWARD, BACKWARD = "data", "forward", "backward"
COMMUNICATION, OPTIMIZER = "communication", "optimizer"
PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)

_spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
_inner = [0.0]  # seconds of the parts inside each part that is under way
_precise = False


def precisely() -> None:
    """From now on the device is waited for at the ends of all parts."""
    global _precise
    _precise = True


@contextmanager
def timing(part: str) -> Iterator[None]:
    """Inside, seconds belong to `part`."""
    began = _now()
    _inner.append(0.0)
    try:
        yield
    finally:
        seconds = _now() - began
        _spent[part] += seconds - _inner.pop()
        _inner[-1] += seconds


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose seconds belong to `part`."""

    @wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with timing(part):
            return function(*args, **kwargs)

    return inside


def spent() -> dict[str, float]:
    """Seconds of each part since the last call; nothing where they would not be true."""
    taken = dict(_spent)
    _spent.update(dict.fromkeys(PARTS, 0.0))
    return taken if _precise or not torch.cuda.is_available() else {}


def _now() -> float:
    if _precise and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
