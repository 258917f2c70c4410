"""No process waits for ever for another: signs of life, and a verdict that names a rank.

1. doing     the main thread says what it begins: a mark of progress
2. _report   a thread writes marks, place and a sign of life into the launcher's store
3. _judge    rank 0 reads all reports, the others read its own: none is without a judge
4. _leave    all processes end by the first verdict, whatever their main threads wait for

The store has a few small requests per process and second, and there are no collectives.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from traceback import walk_stack
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from dit.distributed.watchdog.verdict import (
    AGAIN,
    SUMMARY,
    Departure,
    Heartbeat,
    LastHeard,
    Limit,
    Verdict,
    gone,
    stuck,
)

_ROUND_S = 1.0
_PATIENCE_S = 10.0
"""For a main thread that leaves by itself, or waits to hear why it must."""
_ROOT = f"{Path(__file__).parents[2]}/"
_OURS = tuple(f"{_ROOT}{part}/" for part in ("dit", "recipes"))
# Whoever stands here waits for another process.
_WAITING = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/distributed/",
    "megatron/core/pipeline_parallel/p2p_communication.py",
)
_UNKNOWN = f"another process of the run died, or its node is lost; {SUMMARY}"


class PeerError(ConnectionError):
    """Another process keeps this one from going on. Empty where that one says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Doing:
    what: str = "start"
    step: int = 0
    marks: int = 0


_now = _Doing()
_helper: threading.Thread | None = None


def heartbeat(what: str, *, step: int | None = None) -> None:
    """Says what the main thread begins, with the first mark of a step its number.

    Between two marks may pass no more than `dist.distributed_timeout_minutes`.
    """
    global _now
    new = step is not None and step != _now.step
    _now = _Doing(
        what=what, step=_now.step if step is None else step, marks=0 if new else _now.marks + 1
    )


@contextmanager
def standing_in(helper: threading.Thread) -> Iterator[None]:
    """Inside, the main thread waits for `helper`, and is where that one is."""
    global _helper
    _helper = helper
    try:
        yield
    finally:
        _helper = None


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether gloo or NCCL says that another process is gone, which that one could not say."""
    if error is None:
        return False
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return gloo or isinstance(error, dist.DistError) or is_lost_peer(error.__cause__)


@contextmanager
def watchdog(*, limit_s: float, say: Callable[[str], None], again: str = AGAIN) -> Iterator[None]:
    """Inside, a process that dies, or stands still for `limit_s`, ends all processes of the run.

    `say` shows a message unless another process has shown one; `again` ends it, and says what
    becomes of the run. A process without a launcher has
    nobody to wait for, and is not watched.

    Raises:
        PeerError: instead of the error of a broken connection; it names the rank that broke it.
    """
    if "RANK" not in os.environ:
        yield
        return
    watch = _Watch(limit_s=limit_s, say=say, again=again)
    try:
        yield
        heartbeat("end")
        dist.barrier()  # who leaves before the others looks dead
    except BaseException as error:
        watch.explain(error)
        raise
    finally:
        watch.stop()


class _Watch:
    """The part of one process."""

    def __init__(self, *, limit_s: float, say: Callable[[str], None], again: str):
        self.say = say
        self.round_s = min(_ROUND_S, limit_s / 8)
        rounds = round(limit_s / self.round_s)
        self.limit = Limit(seconds=limit_s, rounds=rounds, again=again)
        self.store = PrefixStore("watch", _own_connection())
        self.launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.main = threading.get_ident()
        self.left = Departure.NOT
        self.verdict = Verdict(text=_UNKNOWN)
        self.over, self.wake, self.told, self.decided = (threading.Event() for _ in range(4))
        self.unanswered = 0  # rounds since the store answered
        me = psutil.Process()
        self.me = Heartbeat(
            rank=dist.get_rank(), host=socket.gethostname(), pid=me.pid, born=me.create_time()
        )
        self._report()
        dist.barrier()  # from here on there is a report of every process
        self.keys = [str(rank) for rank in range(1 if self.me.rank else dist.get_world_size())]
        self.seen = [LastHeard(report=report) for report in self._reports()]
        works = (self._work, self._guard)
        self.threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self.threads:
            thread.start()

    def explain(self, error: BaseException) -> None:
        """Tells the others that this process leaves, and finds out whether it must."""
        # A launcher that has seen a process die ends the others, before they can say which.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.left = Departure.LOST if is_lost_peer(error) else Departure.FAILED
        self.wake.set()
        if self.left is Departure.FAILED:
            self.told.wait(_PATIENCE_S)
            return
        self.decided.wait(_PATIENCE_S)
        raise PeerError(self.verdict.text) from error

    def stop(self) -> None:
        self.over.set()
        self.wake.set()
        for thread in self.threads:
            thread.join(2 * self.round_s)

    def _work(self) -> None:
        try:
            while not self.over.is_set():
                leaving = self.left
                self._report()
                if leaving is Departure.FAILED:
                    self._linger()
                    self.told.set()
                    return
                self._judge()
                self.unanswered = 0
                self.wake.wait(self.round_s)
                self.wake.clear()
        except RuntimeError:
            if not self.over.wait(3 * self.round_s):
                self._lose_store()

    def _guard(self) -> None:
        """A store whose machine is stopped or lost never answers, whatever its timeout."""
        still, before = 0, _now
        while not self.over.wait(self.round_s):
            still, before = (still + 1 if _now is before else 0), _now
            self.unanswered += 1
            if min(still, self.unanswered) > self.limit.rounds:
                self._lose_store()

    def _report(self) -> None:
        place, waits = _place(self.main)
        self.me = replace(
            self.me,
            **asdict(_now),
            beat=self.me.beat + 1,
            place=place,
            waits=waits,
            left=self.left,
        )
        self.store.set(str(self.me.rank), self.me.write())

    def _reports(self) -> list[Heartbeat]:
        return [Heartbeat.read(text) for text in self.store.multi_get(self.keys)]

    def _judge(self) -> None:
        self.seen = [s.then(new) for s, new in zip(self.seen, self._reports(), strict=True)]
        lost = Departure.LOST in {self.left, *(s.report.left for s in self.seen)}
        found = gone(self.seen, self.limit, lost=lost)
        if found is None and self.me.rank == 0:
            found = stuck(self.seen, self.limit)
        if found is not None:  # the first verdict counts
            self._obey(Verdict.read(self.store.compare_set("verdict", "", found.write())))
        elif self.store.check(["verdict"]):
            self._obey(Verdict.read(self.store.get("verdict")))

    def _obey(self, verdict: Verdict) -> None:
        self._linger()
        self._leave(verdict)

    def _linger(self) -> None:
        """Gives the others time to read, where the store ends with this process."""
        if self.me.rank == 0 and not self.launched:
            time.sleep(3 * self.round_s)

    def _lose_store(self) -> None:
        first = self.seen[0].report
        if self.launched:
            place = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
            who, silent = f"the launcher of the first node ({place})", ()
        else:
            who, silent = f"{first}", (first,)
        text = f"{who} died or does not answer; {self.limit.summary}"
        said = first.left is Departure.FAILED
        self._leave(Verdict() if said else Verdict(text=text, silent=silent))

    def _leave(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.decided.set()
        for report in verdict.silent:
            if report.host == self.me.host:
                _kill(report)
        if self.left is Departure.LOST:
            # The main thread says it, and ends this process: where the store is gone, it finds out
            # only after `_ANSWER_S` (dit.distributed.entry) that it is the one to speak.
            time.sleep(3 * _PATIENCE_S)
        elif verdict.text:
            self.say(verdict.text)
        # What the main thread may still say, of the end of its children, is not what went wrong.
        sys.excepthook = lambda *_: None
        _kill_children(psutil.Process())
        os._exit(1)


def _own_connection() -> Store:
    """The store of the process group, which a main thread may keep waiting."""
    store: Any = _get_default_store()
    return store.clone()


def _place(thread: int) -> tuple[str, bool]:
    """The line of our code at which a thread is, and whether it waits for another process."""
    innermost, waits = "", False
    frames, helper = sys._current_frames(), _helper
    own = frames[thread]
    for frame, line in walk_stack(own if helper is None else frames.get(helper.ident or 0, own)):
        file = frame.f_code.co_filename
        place = f"{file.removeprefix(_ROOT)}:{line} in {frame.f_code.co_name}"
        if file.startswith(_OURS):
            return place, waits
        innermost = innermost or place
        waits = waits or any(part in file for part in _WAITING)
    return innermost, waits


def _kill(report: Heartbeat) -> None:
    """Ends a stopped process, which the launcher would give half a minute."""
    with suppress(psutil.Error):
        process = psutil.Process(report.pid)
        if abs(process.create_time() - report.born) < 1:  # the number may be another's by now
            _kill_children(process)
            process.kill()


def _kill_children(process: psutil.Process) -> None:
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
