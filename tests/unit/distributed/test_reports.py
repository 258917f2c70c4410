"""What the watchdog says of the main thread, and that it keeps nothing of it."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from dit.distributed.watchdog import monitor


class _Tensor:
    """Stands for what a step holds."""


def _step() -> weakref.ref[_Tensor]:
    """A step of the main thread, in which another thread reports where it is."""
    held = _Tensor()
    with ThreadPoolExecutor(1) as pool:
        place, _ = pool.submit(monitor._place, threading.get_ident()).result()
    assert place
    return weakref.ref(held)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_report_keeps_nothing_of_the_step_that_it_tells_of(steps: int) -> None:
    """Python's collector is off between the steps of a run: a cycle would live for a hundred."""
    gc.collect()
    gc.disable()
    try:
        assert [_step()() for _ in range(steps)] == [None] * steps
    finally:
        gc.enable()
