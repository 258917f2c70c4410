"""What the watchdog says of the main thread, and that it keeps nothing of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dit.distributed.watchdog import monitor
from dit.distributed.watchdog.verdict import Heartbeat, LastHeard, Limit, find_dead


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


@pytest.mark.parametrize(
    ("inner", "waits"), [("torch/distributed/distributed_c10d.py", True), ("torch/_ops.py", False)]
)
def test_a_thread_below_our_line_may_wait_for_others(monkeypatch, inner: str, waits: bool) -> None:
    files = (inner, "torch/utils/_contextlib.py", f"{monitor._ROOT}dit/train/step.py")
    codes = [SimpleNamespace(co_filename=file, co_name="named") for file in files]
    stack = [(SimpleNamespace(f_code=code), line) for line, code in enumerate(codes)]
    monkeypatch.setattr(monitor, "walk_stack", lambda _: stack)
    assert monitor._place(threading.get_ident()) == ("dit/train/step.py:2 in named", waits)


HOLD = """
import gc, threading, time
from dit.distributed.watchdog import monitor
from dit.distributed.watchdog.verdict import Heartbeat, LastHeard, Limit, find_dead

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


@pytest.mark.parametrize("ranks", [2, 8, 256, 1024])
def test_the_watchdog_reads_few_reports_a_second_and_finds_the_dead_in_time(ranks: int) -> None:
    """Before the launcher kills the rest, 30 seconds after the first death; one round is read."""
    limit = Limit.of(ranks, seconds=600, again="")
    assert ranks / limit.round_s <= 200
    reports = [Heartbeat(rank=rank, host="a", pid=1, born=0) for rank in range(ranks)]
    heard = [LastHeard(report=one, silent=limit.dead) for one in reports]
    assert find_dead(heard, limit, lost=True) is None
    read = [replace(one, beat=one.beat + (one.rank != 1)) for one in reports]  # rank 1 has died
    heard = [last.then(new) for last, new in zip(heard, read, strict=True)]
    found = find_dead(heard, limit, lost=True)
    assert found is not None and found.text.startswith("rank 1 (host a, pid 1) died")
    assert (limit.dead + 2) * limit.round_s < 30


def test_few_ranks_and_short_limits_have_the_rounds_that_they_had() -> None:
    usual = Limit.of(8, seconds=600, again="")
    assert (usual.round_s, usual.rounds, usual.dead) == (1, 600, 5)
    assert Limit.of(4, seconds=5, again="").rounds == 8
