"""The watchdog of one process: threads that report its activity, judge all reports, and end it.

1. _report   writes the main thread's activity, position and a sign of life into the store
2. _judge    rank 0 reads all reports, and the others read rank 0's: every process is watched
3. _leave    all processes end at the first verdict, whatever their main threads wait for

Without a launcher the store ends with rank 0, which therefore leaves last, after the others have
agreed in the store which of them shows the message.

In each round the store answers a few small requests per process. A round takes a second, and longer
with many ranks, because rank 0 reads all reports while it trains. There are no collectives.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dit.distributed.entry import kill_children, leave, shown_at_once
from dit.distributed.process_groups import store_connection
from dit.distributed.watchdog.main_thread import MainThread, PeerError, heartbeat, is_lost_peer
from dit.distributed.watchdog.verdict import (
    SUMMARY,
    Departure,
    Heartbeat,
    LastHeard,
    Limit,
    Verdict,
    find_dead,
    find_stuck,
)
from dit.launched import LauncherWatch, is_launched, meets_others

_PATIENCE_S = 10.0
"""Seconds to wait for a main thread that is leaving, or for the verdict it asks for."""
_ROOT = f"{Path(__file__).parents[3]}/"
_OURS = tuple(f"{_ROOT}{part}/" for part in ("dit", "recipes"))
# A thread in one of these files waits for another process.
_WAITING = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/distributed/",
    "megatron/core/pipeline_parallel/p2p_communication.py",
)
_NONE = Verdict()
_UNKNOWN = f"another process of the run died, or its node is lost; {SUMMARY}"


AGAIN = "Started again, the run goes on from its last checkpoint"


@contextmanager
def watchdog(*, limit_s: float, say: Callable[[str], None], again: str = AGAIN) -> Iterator[None]:
    """A context in which one process that dies or hangs ends all processes of the run.

    A process hangs if it makes no progress for `limit_s` seconds. `say` shows a message unless
    another process has shown one; `again` is the message's last sentence, on what happens next.
    Without a launcher there is one process and no watchdog.

    Raises:
        PeerError: instead of the error of a broken connection; names the rank that broke it.
    """
    if not meets_others():
        yield
        return
    monitor = Monitor(limit_s=limit_s, say=say, again=again)
    try:
        with shown_at_once():  # while the store can still tell which process failed first
            yield
        heartbeat("end")
        dist.barrier()  # a process that leaves before the others looks dead
    except BaseException as error:
        monitor.explain(error)
        raise
    finally:
        monitor.stop()


class Monitor:
    """Threads of the watchdog in one process, from construction to `stop`."""

    def __init__(self, *, limit_s: float, say: Callable[[str], None], again: str):
        self.say = say
        self.limit = Limit.of(dist.get_world_size(), seconds=limit_s, again=again)
        self.round_s = self.limit.round_s
        # Time for rank 0 to judge, and for this process to read the verdict.
        self.patience_s = max(_PATIENCE_S, (self.limit.dead + 3) * self.round_s)
        self.store = PrefixStore("watch", store_connection())
        self.launched = is_launched()
        self.main = threading.get_ident()
        self.departure = Departure.NOT
        self.verdict = Verdict(text=_UNKNOWN)
        self.over, self.wake, self.told, self.decided = (threading.Event() for _ in range(4))
        self.unanswered = 0  # rounds since the store last answered
        me = psutil.Process()
        self.me = Heartbeat(
            rank=dist.get_rank(), host=socket.gethostname(), pid=me.pid, born=me.create_time()
        )
        LauncherWatch.paused = self.launched
        self._report()
        dist.barrier()  # from here on the store has a report of every process
        self.keys = [str(rank) for rank in range(1 if self.me.rank else dist.get_world_size())]
        self.heard = [LastHeard(report=report) for report in self._reports()]
        works = (self._run, self._guard_store)
        self.threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self.threads:
            thread.start()

    def explain(self, error: BaseException) -> None:
        """Reports that this process leaves because of `error`, and waits until others know it.

        From here on the process ignores SIGTERM, so that it can still say why it ends.

        Raises:
            PeerError: the error is a broken connection; names the rank that broke it.
        """
        # A launcher that has seen a process die ends the others before they can say which one.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.departure = Departure.LOST if is_lost_peer(error) else Departure.FAILED
        self.wake.set()
        if self.departure is Departure.FAILED:
            self.told.wait(self.patience_s)
            return
        self.decided.wait(self.patience_s)
        raise PeerError(self.verdict.text) from error

    def stop(self) -> None:
        LauncherWatch.paused = False
        self.over.set()
        self.wake.set()
        for thread in self.threads:
            thread.join(2 * self.round_s)

    def _run(self) -> None:
        try:
            while not self.over.is_set():
                leaving = self.departure
                self._report()
                if leaving is Departure.FAILED:
                    self._release_store()
                    self.told.set()
                    return
                self._judge()
                self.unanswered = 0
                self.wake.wait(self.round_s)
                self.wake.clear()
        except RuntimeError:
            if not self.over.wait(3 * self.round_s):
                self._lose_store()

    def _guard_store(self) -> None:
        """Ends this process if the store no longer answers and the main thread makes no progress.

        This happens if the machine of the store is lost.
        """
        still, before = 0, MainThread.activity
        while not self.over.wait(self.round_s):
            now = MainThread.activity
            still, before = (still + 1 if now is before else 0), now
            self.unanswered += 1
            if min(still, self.unanswered) > self.limit.rounds:
                self._lose_store()

    def _report(self) -> None:
        place, waits = _place(self.main)
        self.me = replace(
            self.me,
            **asdict(MainThread.activity),
            beat=self.me.beat + 1,
            place=place,
            waits=waits,
            left=self.departure,
        )
        self.store.set(str(self.me.rank), self.me.write())

    def _reports(self) -> list[Heartbeat]:
        return [Heartbeat.read(text) for text in self.store.multi_get(self.keys)]

    def _judge(self) -> None:
        self.heard = [last.then(new) for last, new in zip(self.heard, self._reports(), strict=True)]
        lost = Departure.LOST in {self.departure, *(last.report.left for last in self.heard)}
        found = find_dead(self.heard, self.limit, lost=lost)
        if found is None and self.me.rank == 0:
            found = find_stuck(self.heard, self.limit)
        if found is not None:  # all follow the first verdict in the store
            self._follow(Verdict.read(self.store.compare_set("verdict", "", found.write())))
        elif self.store.check(["verdict"]):
            self._follow(Verdict.read(self.store.get("verdict")))
        elif self.heard[0].report.left is Departure.FAILED:
            self._release_store()  # its loss will say nothing new

    def _follow(self, verdict: Verdict) -> None:
        self._show(verdict)
        self._release_store(verdict)
        self._leave()

    def _release_store(self, verdict: Verdict = _NONE) -> None:
        """Reports that this process no longer needs the store.

        Rank 0, which hosts the store, then waits until every rank has reported the same. It does
        not wait for processes that have died or are stopped, nor longer than a busy machine needs.
        """
        self.store.set(_released(self.me.rank), "")
        if self.me.rank == 0 and not self.launched:
            gone = {report.rank for report in verdict.silent}
            ranks = (last.report.rank for last in self.heard)
            with suppress(dist.DistStoreError):  # it took too long
                self.store.wait(
                    [_released(rank) for rank in ranks if rank not in gone],
                    timedelta(seconds=3 * self.patience_s),
                )

    def _lose_store(self) -> None:
        first = self.heard[0].report
        if self.launched:
            place = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
            who, silent = f"the launcher of the first node ({place})", ()
        else:
            who, silent = f"{first}", (first,)
        text = f"{who} died or does not answer; {self.limit.summary}"
        said = first.left is Departure.FAILED
        verdict = Verdict() if said else Verdict(text=text, silent=silent)
        self._show(verdict)
        self._leave()

    def _show(self, verdict: Verdict) -> None:
        """Kills the silent processes of this machine, and shows the verdict.

        It does so in this thread, because the main thread may be blocked for ever.
        """
        self.verdict = verdict
        for report in verdict.silent:
            if report.host == self.me.host:
                _kill(report)
        if verdict.text:
            self.say(verdict.text)

    def _leave(self) -> None:
        self.decided.set()
        if self.departure is Departure.LOST:
            time.sleep(self.patience_s)  # the main thread closes what it has open, and ends
        # The main thread may still raise an error about its dead children: that is not the cause.
        sys.excepthook = lambda *_: None
        leave(1)


def _released(rank: int) -> str:
    return f"released/{rank}"


def _place(thread: int) -> tuple[str, bool]:
    """(line of code at which `thread` is, whether it waits for another process).

    The line is the innermost one of this project, or of any code if there is none.
    """
    innermost, waits = "", False
    for frame, line in walk_stack(_frame_of(thread)):
        file = frame.f_code.co_filename
        place = f"{file.removeprefix(_ROOT)}:{line} in {frame.f_code.co_name}"
        if file.startswith(_OURS):
            return place, waits
        innermost = innermost or place
        waits = waits or any(part in file for part in _WAITING)
    return innermost, waits


def _frame_of(thread: int) -> FrameType:
    """The current frame of `thread`, or of the helper thread for which the main thread waits."""
    with _no_collection():
        frames = sys._current_frames()
    helper, own = MainThread.waits_for, frames[thread]
    found = own if helper is None else frames.get(helper.ident or 0, own)
    # `frames` has this frame, too: the cycle would keep all frames, and every tensor of a step,
    # until the next collection.
    del frames
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection, in which Python lists its threads.

    Python 3.11 collects garbage while it holds the lock of that list. A destructor that lets other
    threads run, like a process group's, may then wait for ever for a thread that needs the lock to
    start (CPython issue 106883).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _kill(report: Heartbeat) -> None:
    """Kills the stopped process of `report` at once; the launcher would wait half a minute."""
    with suppress(psutil.Error):
        process = psutil.Process(report.pid)
        if abs(process.create_time() - report.born) < 1:  # another process may have its pid by now
            kill_children(process)
            process.kill()
