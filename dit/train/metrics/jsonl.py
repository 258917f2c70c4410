"""Files that grow by one JSON object a step, and what is said where they cannot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from dit.json_text import parse_json


class RecordError(ValueError):
    """The record of a run cannot be written; the message says which file, why and what to do."""


@contextmanager
def writing(
    file: Path | str, *, otherwise: str = "choose another checkpoint.save"
) -> Iterator[None]:
    """Inside, an error of the system becomes one that names `file` and the remedy.

    Raises:
        RecordError: instead of OSError.
    """
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{file} cannot be written ({error.strerror or error}); free space there, or"
            f" {otherwise}. Started again, the run goes on from its last checkpoint"
        ) from error


class JsonlWriter:
    """One JSON object a line, each with its `step`; the file appears with its first line."""

    def __init__(self, path: Path, *, start: int, every_step: bool = False):
        """On a resume, lines after step `start` are cut, and lines that cannot be read left out.

        `every_step` says that each step has a line.

        Raises:
            RecordError: the file cannot be written.
        """
        self.path = path
        self.file: TextIO | None = None
        self.notes: list[str] = []
        """What is missing from the file, for the log."""
        if path.exists():
            with writing(path):
                content = path.read_bytes()
                found = _FoundLine.of(content, start=start)
                if content.startswith(found.kept):
                    os.truncate(path, len(found.kept))
                else:  # only this needs space
                    replace_whole(path, found.kept)
            if start > 0:
                self.notes = [f"{path} {note}" for note in found.notes(start, every_step)]

    def write(self, values: Mapping[str, Any]) -> None:
        """Adds a line.

        Raises:
            RecordError: it cannot.
        """
        # JSON has no NaN; a null says as much to every reader.
        clean = {k: None if _is_nan(v) else v for k, v in values.items()}
        with writing(self.path):
            if self.file is None:
                self.file = self.path.open("a", buffering=1)
            self.file.write(json.dumps(clean, allow_nan=False) + "\n")

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):  # a line that could not be written was an error before
                self.file.close()


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FoundLine:
    """What a run that goes on finds in a file."""

    kept: bytes
    steps: set[int]  # of the lines that are kept
    unreadable: list[int]  # numbers of lines, from 1

    @classmethod
    def of(cls, content: bytes, *, start: int) -> Self:
        """Parts at line feeds alone: JSON may hold all else that ends a line elsewhere."""
        *lines, _torn = content.split(b"\n")
        steps = [_step_of(line) for line in lines]
        kept = {i: step for i, step in enumerate(steps) if step is not None and step <= start}
        return cls(
            kept=b"".join(lines[i] + b"\n" for i in kept),
            steps=set(kept.values()),
            unreadable=[i + 1 for i, step in enumerate(steps) if step is None],
        )

    def notes(self, start: int, every_step: bool) -> list[str]:
        """What is lost, in words."""
        notes = []
        if self.unreadable:
            notes.append(
                f"is damaged: {_counted(len(self.unreadable), 'line')} that cannot be read, line"
                f" {self.unreadable[0]} first, left out"
            )
        first = min(self.steps, default=1)
        if every_step and (lost := [n for n in range(first, start + 1) if n not in self.steps]):
            notes.append(
                f"has lost the lines of {_counted(len(lost), 'step')} up to step {start}, the first"
                f" is step {lost[0]}; the training itself goes on unchanged"
            )
        return notes


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def replace_whole(path: Path, content: bytes) -> None:
    """Writes or replaces a file, which stays as it was where that fails."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _step_of(line: bytes) -> int | None:
    """Step of a line; None where it has none."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return step if type(step) is int and step >= 0 else None
