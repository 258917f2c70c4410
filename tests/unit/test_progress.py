"""Progress on a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest

from dit import progress
from dit.console import Console
from dit.progress import brief, counted, progress_on, tracked


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_tell_the_time_left_at_the_rate_so_far(clock: list[float]) -> None:
    shown = io.StringIO()
    with progress_on(Console(file=shown))("packing", 40, 20) as advance:
        clock[0] += 5
        advance(10)  # 2/s of this run: earlier parts are not of its rate
    assert shown.getvalue() == "packing 30 of 40, 2/s, 0:00:05 left\n"


def test_short_work_leaves_no_line(clock: list[float]) -> None:
    shown = io.StringIO()
    track = progress_on(Console(file=shown), quiet_s=5)
    for _ in tracked(range(10), "decoding", track):
        clock[0] += 0.1
    assert shown.getvalue() == ""
    for _ in tracked(range(10), "decoding", track):
        clock[0] += 2
    assert [line.split()[1] for line in shown.getvalue().splitlines()] == ["3", "6", "9", "10"]


def test_a_log_is_neither_crowded_nor_silent(clock: list[float]) -> None:
    """At most a line in five seconds, at least one a minute, and always the last."""
    shown = io.StringIO()
    track = progress_on(Console(file=shown))
    for seconds, wanted in ((0.001, ["1000"]), (1 / 64, ["320", "640", "960", "1000"])):
        shown.truncate(shown.seek(0))
        for _ in tracked(range(1000), "packing", track):
            clock[0] += seconds
        assert [line.split()[1] for line in shown.getvalue().splitlines()] == wanted
    shown.truncate(shown.seek(0))
    for _ in tracked(range(20), "packing", track):
        clock[0] += 61
    assert len(shown.getvalue().splitlines()) == 20


def test_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    for is_terminal in (True, False):
        shown = io.StringIO()
        track = progress_on(Console(file=shown, force_terminal=is_terminal))
        with track("packing", 25, 0) as advance:
            for _ in range(25):
                advance(1)
        assert ("\x1b" in shown.getvalue()) == is_terminal
        assert is_terminal or shown.getvalue().startswith("packing 25 of 25, ")


def test_slow_work_has_a_speed_and_the_time_left(clock: list[float]) -> None:
    """Rich forgets parts that are 30 seconds old, and a step of a large network takes longer."""
    shown, time = io.StringIO(), {"get_time": lambda: clock[0]}
    console = Console(file=shown, force_terminal=True, width=80, color_system=None, **time)
    with progress_on(console)("sampling steps", 200, 0) as advance:
        for _ in range(3):
            clock[0] += 90
            advance(1)
    assert re.search(r" 3/200 .*4:55:30.*90 s each", shown.getvalue())


def test_a_terminal_that_moves_no_cursor_gets_lines() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, _environ={"TERM": "dumb"})
    assert len(list(tracked(range(20), "decoding", progress_on(console)))) == 20
    assert shown.getvalue().startswith("decoding 20 of 20, ")


def test_numbers_have_no_power_of_ten() -> None:
    wanted = {0.01234: "0.0123", 4.5: "4.5", 99.96: "100", 123.4: "123", 12345.4: "12,345"}
    assert {number: brief(number) for number in wanted} == wanted


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(n, "sample") for n in (0, 1, 1601)] == [
        "0 samples",
        "1 sample",
        "1,601 samples",
    ]
