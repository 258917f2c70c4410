"""Parts in their order, as long as they fit into the time; each result is on disk at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpu_run.parts import Part

Outcome = dict[str, Any]


class State(StrEnum):
    """How a part ended."""

    DONE = "done"
    FAILED = "failed"
    ENDED = "ended at its limit"
    NOT_BEGUN = "not begun"


class Results:
    """The results of all runs on one machine, in a file that is written again after each part."""

    def __init__(self, file: Path, *, about: dict[str, Any]):
        self.file = file
        known = json.loads(file.read_text()) if file.is_file() else {}
        self.parts: dict[str, Outcome] = known.get("parts", {})
        self.content = {"about": known.get("about", {}) | about, "parts": self.parts}

    def put(self, part: str, outcome: Outcome) -> None:
        """Keeps the outcome; what was done before is not lost to a part that did not begin."""
        if outcome["state"] == State.NOT_BEGUN and part in self.parts:
            return
        self.parts[part] = outcome
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(temporary, self.file)

    def done(self) -> list[str]:
        return [name for name, one in self.parts.items() if one["state"] == State.DONE]


def run_parts(
    parts: Sequence[Part],
    *,
    run: Callable[[Part, float], Outcome],
    keep: Callable[[Part, Outcome], None],
    ends_at: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Runs the parts that fit before `ends_at`; returns the names of those that did not begin.

    `run` gets a part and the seconds that it may take, and is not trusted: its exceptions are
    errors of the part.
    """
    left_out = []
    for part in parts:
        began = clock()
        left = ends_at - began
        if left < part.expected_s:
            why = f"{max(left, 0):.0f} s were left, and it takes about {part.expected_s:.0f}"
            keep(part, {"state": State.NOT_BEGUN, "why": why})
            left_out.append(part.name)
            continue
        try:
            outcome = run(part, min(part.limit_s, left))
        except Exception as error:  # noqa: BLE001  # the other parts go on
            outcome = {"state": State.FAILED, "why": f"{type(error).__name__}: {error}"}
        keep(part, outcome | {"took_s": round(clock() - began, 1)})
    return left_out
