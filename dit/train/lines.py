"""Files that grow by one JSON object a step, and what is said where they cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


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


class LinesFile:
    """One JSON object a line, each with its `step`; the file appears with its first line."""

    def __init__(self, path: Path, *, start: int):
        """On a resume, lines after step `start` are cut.

        Raises:
            RecordError: the file cannot be written.
        """
        self.path = path
        self.file: TextIO | None = None
        if path.exists():
            with writing(path):
                lines = path.read_bytes().splitlines(keepends=True)
                partial = path.with_suffix(".partial")
                partial.write_bytes(b"".join(line for line in lines if _step_of(line) <= start))
                partial.replace(path)

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


def _step_of(line: bytes) -> float:
    """Step of a line; infinity for one that a kill cut short."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (json.JSONDecodeError, KeyError):
        return math.inf
