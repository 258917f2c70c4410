"""Rows of the plan as long as they fit into the time; each result is on disk at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from tools.gpu.plan import SMOKE, Row

Outcome = dict[str, Any]


class State(StrEnum):
    """How a row ended."""

    DONE = "done"
    FAILED = "failed"
    ENDED = "ended at its limit"
    NOT_BEGUN = "not begun"


class Results:
    """The results of all runs on one machine, in a file that is written again after each row."""

    def __init__(self, file: Path, *, about: dict[str, Any]):
        self.file = file
        known = json.loads(file.read_text()) if file.is_file() else {}
        self.rows: dict[str, Outcome] = known.get("rows", {})
        self.content = {"about": known.get("about", {}) | about, "rows": self.rows}

    def put(self, row: str, outcome: Outcome) -> None:
        """Keeps the outcome; what was done before is not lost to a row that did not begin."""
        if outcome["state"] == State.NOT_BEGUN and row in self.rows:
            return
        self.rows[row] = outcome
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(temporary, self.file)

    def names(self, *states: State) -> list[str]:
        return [name for name, one in self.rows.items() if one["state"] in states]


def run_rows(
    rows: Sequence[Row],
    *,
    run: Callable[[Row, float], Outcome],
    keep: Callable[[Row, Outcome], None],
    ends_at: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Runs the rows that fit before `ends_at`; returns the names of those that did not begin.

    `run` gets a row and the seconds that it may take, and is not trusted: its exceptions are
    errors of the row. After a smoke test that fails, none begins.
    """
    left_out, stop = [], ""
    for row in rows:
        left = max(ends_at - (began := clock()), 0)
        why = f"{left:.0f} s were left, and it takes about {row.expected_s:.0f}"
        if stop or left < row.expected_s:
            keep(row, {"state": State.NOT_BEGUN, "why": stop or why})
            left_out.append(row.name)
            continue
        try:
            outcome = run(row, min(row.limit_s, left))
        except Exception as error:  # noqa: BLE001  # the other rows go on
            outcome = {"state": State.FAILED, "why": f"{type(error).__name__}: {error}"}
        keep(row, outcome | {"took_s": round(clock() - began, 1)})
        if row is SMOKE and outcome["state"] == State.FAILED:
            stop = "a kernel gives wrong numbers, or none: read the smoke test first"
    return left_out
