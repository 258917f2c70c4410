"""Collects errors of pictures, curves and logs, which must not end the run that they show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dit.parsing import cause
from dit.system_errors import explained, system_number

CELLS = "cells"
"""Key of a grid PNG's metadata: title, and prompt and position of each picture, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotShown:
    """A picture, curve or file that is missing or incomplete, and the reason."""

    what: str  # its kind, without the step: a run reports each kind once
    because: str

    def __str__(self) -> str:
        return f"{self.what}: {self.because}"


@contextmanager
def watching(what: str, undrawn: list[NotShown]) -> Iterator[None]:
    """A context that adds an error, as the failure of `what`, to `undrawn` instead of raising it.

    Use it only for work of a single process: an error during a collective must end all processes.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001
        # Fonts, image and video codecs and dashboards get texts, numbers and files of users, and
        # raise errors of any type: no list of types would be complete.
        because = explained(error) if system_number(error) else cause(error)
        undrawn.append(NotShown(what=what, because=because))
