"""Pictures are worth no run: what cannot be drawn is noted, and whatever asked for it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Undrawn:
    """What could not be drawn, or not as it should be, and why."""

    what: str  # of one kind, whatever the step: a run says each kind once
    because: str

    def __str__(self) -> str:
        return f"{self.what}: {self.because}"


@contextmanager
def drawing(what: str, undrawn: list[Undrawn]) -> Iterator[None]:
    """Inside, an error is added to `undrawn`, and the program goes on after the block.

    Only for work of one process: an error inside a collective must end all of them.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001
        # Fonts, image and video codecs, decoders and dashboards are given the texts, numbers and
        # files of others, and raise whatever they like: no list of types would be complete.
        undrawn.append(Undrawn(what=what, because=in_words(error)))


def in_words(error: Exception) -> str:
    """One line; the kind of the error too, for a KeyError's text is a key alone."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
