"""Finds, in the reports of all processes, the process that has died or that blocks the others.

The functions are pure: no store and no clock. Time is counted in rounds of the reader, because
clocks of nodes differ, and a machine that was asleep must not accuse others when it wakes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from textwrap import shorten

SUMMARY = (
    "the launcher's summary has the exit code of a dead process (-9: killed, most often for want of"
    " memory)"
)
_REPORTS_A_SECOND = 200
"""Most reports that rank 0 reads per second, at 8 us of Python each; 1,024 ranks report every 5
s."""
_MOST_SCENES = 6
"""Most positions of waiting processes that the message of a verdict lists."""


class Departure(StrEnum):
    """Whether a main thread has left its work, and why."""

    NOT = ""
    LOST = "lost"  # it cannot reach another process
    FAILED = "failed"  # its own error, which it shows


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Report of a process: its rank, its activity and its position in the code."""

    rank: int
    host: str
    pid: int
    born: float  # seconds; a later process may have the same pid
    beat: int = 0  # rises while the process lives
    what: str = ""  # the activity of the main thread
    step: int = 0
    marks: int = 0  # calls of `heartbeat` in the step
    place: str = ""  # line of our code at which the main thread is
    waits: bool = False  # whether it waits there for another process
    left: Departure = Departure.NOT

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def scene(self) -> str:
        return f"{self.what} of step {self.step}, {self.place}"

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> Heartbeat:
        parts = json.loads(text)
        return cls(**(parts | {"left": Departure(parts["left"])}))


@dataclass(frozen=True, kw_only=True, slots=True)
class LastHeard:
    """The last report of a process, and for how many rounds it has not changed."""

    report: Heartbeat
    silent: int = 0  # rounds without a sign of life
    still: int = 0  # rounds without progress

    def then(self, new: Heartbeat) -> LastHeard:
        """This record one round later, after the report `new`."""
        old = self.report
        moved = (new.step, new.marks) != (old.step, old.marks)
        return LastHeard(
            report=new,
            silent=0 if new.beat != old.beat else self.silent + 1,
            still=0 if moved else self.still + 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Limits on how long a process may be silent, or make no progress."""

    seconds: float
    round_s: float  # seconds from one report and judgement to the next
    again: str  # sentence on what becomes of the run; empty if it has no checkpoint

    @classmethod
    def of(cls, ranks: int, *, seconds: float, again: str) -> Limit:
        """The limit of `seconds` for `ranks` ranks; `again` says what becomes of the run.

        A round lasts a second, longer if one process reads many reports, and an eighth of `seconds`
        at most.
        """
        round_s = min(max(1.0, ranks / _REPORTS_A_SECOND), seconds / 8)
        return cls(seconds=seconds, round_s=round_s, again=again)

    @property
    def rounds(self) -> int:
        return round(self.seconds / self.round_s)

    @property
    def dead(self) -> int:
        """Rounds of silence after which a process counts as dead, once a connection is broken.

        They are five seconds, but at least three rounds, because a report and its reader may each
        be a round late. So the run has ended before the launcher kills the other processes, 30
        seconds after the first one.
        """
        return max(3, min(5, math.ceil(5 / self.round_s)))

    @property
    def summary(self) -> str:
        return f"{SUMMARY}. {self.again}".rstrip(". ")

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s (dist.distributed_timeout_minutes={self.seconds / 60:g})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why all processes end, and which processes are silent."""

    text: str = ""  # message; empty if a process shows its own error
    silent: tuple[Heartbeat, ...] = ()  # processes that may be stopped and cannot read the verdict

    def write(self) -> str:
        return json.dumps({"text": self.text, "silent": [r.write() for r in self.silent]})

    @classmethod
    def read(cls, text: bytes) -> Verdict:
        parts = json.loads(text)
        return cls(text=parts["text"], silent=tuple(map(Heartbeat.read, parts["silent"])))


def find_dead(heard: Sequence[LastHeard], limit: Limit, *, lost: bool) -> Verdict | None:
    """The verdict that processes have died or failed, or None.

    `lost` says that some process met a broken connection. Then some process has died, and a short
    silence shows which one.
    """
    if any(h.report.left is Departure.FAILED and (lost or h.silent > limit.dead) for h in heard):
        return Verdict()
    patience = min(limit.dead, limit.rounds) if lost else limit.rounds
    dead = [h.report for h in heard if h.report.left is Departure.NOT and h.silent > patience]
    if not dead:
        return None
    fate = (
        "died"
        if lost
        else f"gave no sign of life for {limit}: it died, is stopped, or its node is lost"
    )
    return Verdict(
        text=f"{_name(dead)} {fate}; last seen at {dead[0].scene}; {limit.summary}",
        silent=tuple(dead),
    )


def find_stuck(heard: Sequence[LastHeard], limit: Limit) -> Verdict | None:
    """The verdict that live processes block the others for too long, or None.

    The blocking processes are those that wait for no other process, or all processes if each waits
    for another; of these, the message names those with the least progress.
    """
    here = [h for h in heard if h.report.left is Departure.NOT]
    if any(h.silent > limit.dead for h in here):
        return None  # `find_dead` names the silent process after the limit
    idle = [h.report for h in here if h.still > limit.rounds]
    held = [report for report in idle if not report.waits]
    if not held and len(idle) == len(here):
        held = idle  # all wait for each other
    if not held:
        return None
    least = min((report.step, report.marks) for report in held)
    behind = [report for report in held if (report.step, report.marks) == least]
    there = [report for report in behind if report.scene == behind[0].scene]
    text = f"{_name(behind)} made no progress for {limit}: {behind[0].scene}.{_others(here, there)}"
    text += f" Where that may take so long, raise the limit. {limit.again}"
    return Verdict(text=text.rstrip())


def _others(heard: Sequence[LastHeard], told: Sequence[Heartbeat]) -> str:
    """A sentence on where all processes but those of `told` are, grouped by position."""
    places: dict[str, list[Heartbeat]] = {}
    for report in (h.report for h in heard if h.report not in told):
        places.setdefault(report.scene, []).append(report)
    scenes = [f"{_numbers(of)} at {scene}" for scene, of in [*places.items()][:_MOST_SCENES]]
    return f" Meanwhile {'; '.join(scenes)}." if scenes else ""


def _numbers(reports: Sequence[Heartbeat]) -> str:
    numbers = shorten(", ".join(str(report.rank) for report in reports), 60, placeholder=" ...")
    return f"rank {numbers}"


def _name(reports: Sequence[Heartbeat]) -> str:
    others = ", ".join(str(report.rank) for report in reports[1:])
    return f"{reports[0]}" + (f" and rank {shorten(others, 60)}" if others else "")
