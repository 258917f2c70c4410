"""Progress of long work: a bar on a terminal, lines in a log file, both with the time left.

And numbers as both show them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, ProgressColumn
from rich.progress import Task as RichTask
from rich.text import Text

# (activity, parts in all or 0, parts done before) -> context manager of a function that takes the
# number of parts done since its last call.
Track = Callable[[str, int, int], AbstractContextManager[Callable[[int], None]]]

T = TypeVar("T")
# Where there is no terminal: a line after each tenth, or after so many parts where their number is
# not known; no two lines within five seconds, and one each minute.
_LINES = 10
_PARTS_A_LINE = 10_000
_APART_S = 5
_SILENT_S = 60


def brief(number: float) -> str:
    """Three digits, or all before the point: 0.0123, 4.5, 12,345."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def no_progress(*_: object) -> AbstractContextManager[Callable[[int], None]]:
    """Shows no progress."""
    return nullcontext(lambda _: None)


def progress_on(console: Console, *, quiet_s: float = 0.0) -> Track:
    """A bar on a terminal, else a few plain lines; both with rate and time left.

    Parts of an earlier run count as done, but not for the rate. Lines begin `quiet_s` seconds after
    the activity: what is over by then leaves no line in a log.
    """

    @contextmanager
    def bar(activity: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), _Rate())
        with Progress(*columns, console=console, transient=quiet_s > 0) as progress:
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
            speed = f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
            left = f" of {total}, {speed}, {(total - now) / rate:.0f} s left"
            text = f"{activity} {now}{left if total else f', {speed}'}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield advance

    return bar if console.is_terminal else lines


def tracked(parts: Sequence[T], activity: str, track: Track) -> Iterator[T]:
    """The parts, one after the other; each counts as done when the next one is asked for."""
    with track(activity, len(parts), 0) as advance:
        for part in parts:
            yield part
            advance(1)


class _Rate(ProgressColumn):
    """Parts a second."""

    def render(self, task: RichTask) -> Text:
        done = task.completed - task.fields["before"]
        return Text(f"{done / task.elapsed:.1f}/s" if task.elapsed else "")
