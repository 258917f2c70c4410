"""SIGTERM and Ctrl-C as a wish that the loop looks at after each step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequests:
    """Inside the context, a signal makes `received` true instead of ending the process."""

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = False
        self.before: list[Any] = []

    def __enter__(self) -> StopRequests:
        self.before = [signal.signal(s, self._note) for s in self.signals]
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in zip(self.signals, self.before, strict=True):
            signal.signal(s, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
