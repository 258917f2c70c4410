"""What the watchdog says of the main thread, and that it keeps nothing of it."""

from __future__ import annotations

import gc
import subprocess
import sys
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


HOLD = """
import gc, threading, time
from dit.distributed.watchdog import monitor

def start_threads():
    while True:
        thread = threading.Thread(target=time.monotonic)
        thread.start()
        thread.join()

def let_others_run(phase, _):
    if phase == "start":
        time.sleep(1e-4)  # as the destructor of a process group does

threading.Thread(target=start_threads, daemon=True).start()
main = threading.get_ident()
gc.callbacks.append(let_others_run)
gc.set_threshold(1)
end = time.monotonic() + 2
while time.monotonic() < end:
    monitor._place(main)
"""


@pytest.mark.slow
def test_a_report_does_not_stop_all_threads_where_garbage_is_collected() -> None:
    """Python 3.11 collects inside the call that lists the threads' frames, with a lock held."""
    done = subprocess.run([sys.executable, "-c", HOLD], timeout=60, check=False)
    assert done.returncode == 0
