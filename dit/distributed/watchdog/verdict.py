"""Reports of all processes -> who has died, or holds up the others. Pure: no store, no clock.

Time is counted in rounds of the reader: clocks of nodes differ, and a machine that was asleep must
not condemn anybody when it wakes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from textwrap import shorten

_DEAD = 5
"""Rounds of silence that show who has died, once somebody has met a broken connection."""
AGAIN = "Started again, the run goes on from its last checkpoint"
SUMMARY = (
    "the launcher's summary has the exit code of a dead process (-9: killed, most often for want of"
    " memory)"
)
_MOST_SCENES = 6
"""Places that a verdict names where many processes wait at different ones."""


class Departure(StrEnum):
    """How a main thread has left its work."""

    NOT = ""
    LOST = "lost"  # because it cannot reach another process
    FAILED = "failed"  # for a reason of its own, which it says


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A process as it shows itself."""

    rank: int
    host: str
    pid: int
    born: float  # tells it from a later process with its number
    beat: int = 0  # rises while the process lives
    what: str = ""  # its main thread is at
    step: int = 0
    marks: int = 0  # of progress in the step
    place: str = ""  # in our code
    waits: bool = False  # for another process
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
    """A report, and for how long the process has not changed."""

    report: Heartbeat
    silent: int = 0  # rounds without a sign of life
    still: int = 0  # rounds without progress

    def then(self, new: Heartbeat) -> LastHeard:
        """What is seen a round later."""
        old = self.report
        moved = (new.step, new.marks) != (old.step, old.marks)
        return LastHeard(
            report=new,
            silent=0 if new.beat != old.beat else self.silent + 1,
            still=0 if moved else self.still + 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How long a process may be silent, or do the same."""

    seconds: float
    rounds: int
    again: str = AGAIN  # what becomes of the run; empty where there is nothing to go on from

    @property
    def summary(self) -> str:
        return f"{SUMMARY}. {self.again}".rstrip(". ")

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s (dist.distributed_timeout_minutes={self.seconds / 60:g})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why all processes end."""

    text: str = ""  # empty where a process says it itself
    silent: tuple[Heartbeat, ...] = ()  # those that may be stopped, and hear no verdict

    def write(self) -> str:
        return json.dumps({"text": self.text, "silent": [r.write() for r in self.silent]})

    @classmethod
    def read(cls, text: bytes) -> Verdict:
        parts = json.loads(text)
        return cls(text=parts["text"], silent=tuple(map(Heartbeat.read, parts["silent"])))


def gone(seen: Sequence[LastHeard], limit: Limit, *, lost: bool) -> Verdict | None:
    """Who has died or failed, if anybody has.

    `lost` says that some process has met a broken connection: then somebody has, and a short
    silence shows who.
    """
    if any(s.report.left is Departure.FAILED and (lost or s.silent > _DEAD) for s in seen):
        return Verdict()
    patience = min(_DEAD, limit.rounds) if lost else limit.rounds
    dead = [s.report for s in seen if s.report.left is Departure.NOT and s.silent > patience]
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


def stuck(seen: Sequence[LastHeard], limit: Limit) -> Verdict | None:
    """Who is alive and holds up the others, if anybody has for too long.

    It is not one of those that wait for another process, and has done least of all that do not.
    """
    here = [s for s in seen if s.report.left is Departure.NOT]
    if any(s.silent > _DEAD for s in here):
        return None  # `gone` names that one, once it is silent for long enough
    idle = [s.report for s in here if s.still > limit.rounds]
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


def _others(seen: Sequence[LastHeard], told: Sequence[Heartbeat]) -> str:
    """What the processes are at whose place is not told yet: those at one place together."""
    places: dict[str, list[Heartbeat]] = {}
    for report in (s.report for s in seen if s.report not in told):
        places.setdefault(report.scene, []).append(report)
    scenes = [f"{_numbers(of)} at {scene}" for scene, of in [*places.items()][:_MOST_SCENES]]
    return f" Meanwhile {'; '.join(scenes)}." if scenes else ""


def _numbers(reports: Sequence[Heartbeat]) -> str:
    numbers = shorten(", ".join(str(report.rank) for report in reports), 60, placeholder=" ...")
    return f"rank {numbers}"


def _name(reports: Sequence[Heartbeat]) -> str:
    others = ", ".join(str(report.rank) for report in reports[1:])
    return f"{reports[0]}" + (f" and rank {shorten(others, 60)}" if others else "")
