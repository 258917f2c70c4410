"""Files that grow by one JSON object a step, and what is said where they cannot."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TextIO

import torch
import torch.distributed as dist

from dit.data.rejections import MOST_NAMED, RefusedSample
from dit.distributed.process_groups import device
from dit.json_text import parse_json
from dit.train.checkpoint.paths import SOFTWARE


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


REFUSED_FILE = "refused_samples.jsonl"
_NAMES = ("dataset", "shard", "key", "reason")


class RefusedFile:
    """The file, which only the first rank writes."""

    def __init__(self, folder: Path, *, start: int):
        """Goes on after step `start`."""
        self.path = folder / REFUSED_FILE
        self._lines = JsonlWriter(self.path, start=start)
        self._known = set(_known(self.path))

    def add(self, samples: Iterable[RefusedSample], *, step: int) -> None:
        """Adds those that are new, while there is room.

        Raises:
            RecordError: the file cannot be written.
        """
        for sample in samples:
            values = asdict(sample)
            name = tuple(values[part] for part in _NAMES)
            if name not in self._known and len(self._known) < MOST_NAMED:
                self._known.add(name)
                self._lines.write({"step": step, **values})

    def close(self) -> None:
        self._lines.close()


def _known(path: Path) -> Iterable[tuple[Any, ...]]:
    """Names of the samples that the file has."""
    if not path.exists():
        return
    with writing(path):
        content = path.read_bytes()
    for line in content.split(b"\n"):
        try:
            values = parse_json(line)
            yield tuple(str(values[part]) for part in _NAMES)
        except (ValueError, LookupError, TypeError):
            continue  # an empty one at the end, or one that is damaged: the sample is named again


ENVIRONMENT_FILE = "environment.jsonl"
_PACKAGES = ("torch", "megatron-core", "megatron-energon", "transformer-engine")


def environment(*, step: int, layout: str) -> dict[str, Any]:
    """The line of a start at `step`."""
    return {
        "step": step,
        "software": SOFTWARE,
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device().type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{dist.get_world_size()} x {_device_name()}",
        "layout": layout,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else "CPU"
