"""Progress of long work: a bar on a terminal, lines in a log file, both with the time left.

It also formats numbers and lists.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as RichTask
from rich.table import Column
from rich.text import Text

from dit.console import Console

# (activity, number of all parts or 0 if unknown, number of parts done before) -> context manager
# that gives a function; each call of it takes the number of parts done since the last call.
Track = Callable[[str, int, int], AbstractContextManager[Callable[[int], None]]]

T = TypeVar("T")
# Without a terminal a line is printed after each tenth of the parts, or after _PARTS_A_LINE parts
# if their number is unknown; two lines are five seconds to a minute apart.
_LINES = 10
_PARTS_A_LINE = 10_000
_APART_S = 5
_SILENT_S = 60


def brief(number: float) -> str:
    """`number` with three digits, or with all digits before the point: 0.0123, 4.5, 12,345."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def counted(number: int, what: str) -> str:
    """`number` with its noun `what`, such as 1 sample and 1,601 samples."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def first_of(names: Sequence[object], most: int) -> str:
    """The first `most` of `names`, and the number of others: a, b and 3 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def in_words(seconds: float) -> str:
    """`seconds` as hours, minutes and seconds left, such as 0:02:41 left."""
    return f"{timedelta(seconds=round(seconds))} left"


def no_progress(*_: object) -> AbstractContextManager[Callable[[int], None]]:
    """A context that shows no progress, in place of a `Track`."""
    return nullcontext(lambda _: None)


def progress_on(console: Console, *, quiet_s: float = 0.0) -> Track:
    """A `Track` with a bar on a terminal, else with plain lines; both show rate and time left.

    Parts of an earlier run count as done, but not for the rate. Lines begin `quiet_s` seconds after
    the start, so short work leaves no line in a log.
    """

    @contextmanager
    def bar(activity: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        columns = (
            TextColumn("{task.description}", markup=False),
            *DONE_AND_LEFT,
            TaskProgressColumn(),
            _Rate(),
        )
        with one_line(console, *columns, transient=quiet_s > 0) as progress:
            task = progress.add_task(activity, total=total or None, completed=done, before=done)
            yield lambda count: progress.advance(task, count)

    @contextmanager
    def lines(activity: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        now, start = done, time.monotonic()
        told, told_at = now, start  # by the last line
        step = total / _LINES if total else _PARTS_A_LINE

        def advance(count: int) -> None:
            nonlocal now, told, told_at
            now, clock = now + count, time.monotonic()
            silent, seconds = clock - told_at, max(1e-9, clock - start)
            due = silent >= _SILENT_S or (silent >= _APART_S and now - told >= step)
            if not count or seconds < quiet_s or not (due or now == total):
                return
            told, told_at = now, clock
            rate = (now - done) / seconds
            left = f" of {total}, {_speed(rate)}, {in_words((total - now) / rate)}"
            text = f"{activity} {now}{left if total else f', {_speed(rate)}'}"
            console.print(text)

        yield advance

    return bar if console.is_interactive else lines


def tracked(parts: Sequence[T], activity: str, track: Track) -> Iterator[T]:
    """Yields `parts` one by one; each counts as done when the next one is requested."""
    with track(activity, len(parts), 0) as advance:
        for part in parts:
            yield part
            advance(1)


DONE_AND_LEFT = (
    MofNCompleteColumn(table_column=Column(no_wrap=True)),
    BarColumn(20, table_column=Column(no_wrap=True)),
    TimeRemainingColumn(table_column=Column(no_wrap=True)),
)
"""Columns that a narrow terminal shows, too: the number of parts done, and the time left."""


def one_line(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """A progress bar with these `columns`; a narrow terminal cuts columns of class `Shortened`."""
    # By default rich takes speeds from the last 30 seconds: with slower parts it never knows one.
    return Progress(*columns, console=console, transient=transient, speed_estimate_period=math.inf)


class Shortened(ProgressColumn):
    """A column with the description of a task, cut at the end of the line."""

    def render(self, task: RichTask) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _Rate(ProgressColumn):
    """A column with parts per second, or seconds per part."""

    def render(self, task: RichTask) -> Text:
        done = task.completed - task.fields["before"]
        return Text(_speed(done / task.elapsed) if done and task.elapsed else "", no_wrap=True)


def _speed(rate: float) -> str:
    if rate < 1:
        return f"{brief(1 / rate)} s each"
    return f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
