"""Files of a run with one JSON object on each line, which has the number of its step.

RUN/refused_samples.jsonl has a line for each refused sample, up to 10,000:

    step      step at which the run learned of it
    key       key of the sample in its shard
    shard     path of the shard in the folder of the dataset
    dataset   folder of the dataset
    reason    one of dit/data/rejections.py
    detail    the values that led to the refusal

A sample that is refused in several epochs has one line, also after a resume.

RUN/environment.jsonl has a line for each start:

    step       number of steps that the run had taken
    software   this program, then the packages that affect its numbers
    device     number and kind of devices
    layout     parallelism of the model
"""

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

from dit.checkpoint_paths import SOFTWARE
from dit.data.rejections import MOST_NAMED, RefusedSample
from dit.distributed.process_groups import device
from dit.parsing import parse_json
from dit.progress import counted
from dit.safe_writing import write_atomically
from dit.system_errors import writing


class LogFileError(ValueError):
    """A log file of a run that cannot be written; the message names file, reason and remedy."""


@contextmanager
def explain_write_errors(
    file: Path | str, *, otherwise: str = "choose another checkpoint.save"
) -> Iterator[None]:
    """A context that turns an OSError of writing `file` into an error with the remedy `otherwise`.

    Raises:
        LogFileError: instead of OSError.
    """
    try:
        yield
    except OSError as error:
        raise LogFileError(
            f"{file} cannot be written ({error.strerror or error}); free space there, or"
            f" {otherwise}. Started again, the run goes on from its last checkpoint"
        ) from error


class JsonlWriter:
    """Writes one JSON object on each line, with its `step`; the first line creates the file."""

    def __init__(self, path: Path, *, start: int, every_step: bool = False):
        """Continues the file `path`, and drops its lines after step `start` and unreadable ones.

        `every_step` states that each step has a line, so that `notes` mention missing ones.

        Raises:
            LogFileError: the file cannot be written.
        """
        self.path = path
        self.file: TextIO | None = None
        self.notes: list[str] = []
        """Sentences about lines that are missing from the file."""
        if path.exists():
            with explain_write_errors(path):
                content = path.read_bytes()
                found = _ExistingLines.of(content, start=start)
                if content.startswith(found.kept):
                    os.truncate(path, len(found.kept))
                else:  # unlike a truncation, this needs space on the disk
                    write_atomically(path, found.kept)
            if start > 0:
                self.notes = [f"{path} {note}" for note in found.notes(start, every_step)]

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends `values` as a line.

        Raises:
            OSError: the file cannot be written. A later call tries to write the missing lines.
        """
        # JSON has no NaN, so it is written as null.
        clean = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        if self.file is None:
            self.file = self.path.open("a", buffering=1)
        with writing(self.path):
            self.file.write(json.dumps(clean, allow_nan=False) + "\n")

    def sum_of(self, *names: str) -> float:
        """The sum of the values called `names` over all lines in the file."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        return sum(values.get(name, 0.0) for values in map(parse_json, lines) for name in names)

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):  # a failed write has raised before
                self.file.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExistingLines:
    """Lines that a resumed run finds in its file."""

    kept: bytes
    steps: set[int]  # of the lines that are kept
    unreadable: list[int]  # numbers of lines, from 1

    @classmethod
    def of(cls, content: bytes, *, start: int) -> Self:
        """Splits `content` into lines, and keeps the readable ones up to step `start`."""
        *lines, _torn = content.split(b"\n")
        steps = [_step_of(line) for line in lines]
        kept = {i: step for i, step in enumerate(steps) if step is not None and step <= start}
        return cls(
            kept=b"".join(lines[i] + b"\n" for i in kept),
            steps=set(kept.values()),
            unreadable=[i + 1 for i, step in enumerate(steps) if step is None],
        )

    def notes(self, start: int, every_step: bool) -> list[str]:
        """One sentence for each kind of missing line."""
        notes = []
        if self.unreadable:
            notes.append(
                f"is damaged: {counted(len(self.unreadable), 'line')} that cannot be read (the"
                f" first is line {self.unreadable[0]}) will be dropped"
            )
        first = min(self.steps, default=1)
        if every_step and (lost := [n for n in range(first, start + 1) if n not in self.steps]):
            notes.append(
                f"has lost the lines of {counted(len(lost), 'step')} up to step {start} (the first"
                f" is step {lost[0]}); the training itself goes on unchanged"
            )
        return notes


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if the line cannot be read."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return step if type(step) is int and step >= 0 else None


REFUSED_FILE = "refused_samples.jsonl"
_IDENTITY = ("dataset", "shard", "key", "reason")


class RefusedFile:
    """RUN/refused_samples.jsonl, which only the first rank writes."""

    def __init__(self, folder: Path, *, start: int):
        """Continues the file in `folder` after step `start`."""
        self.path = folder / REFUSED_FILE
        self._lines = JsonlWriter(self.path, start=start)
        self._known = set(_known_samples(self.path))

    def add(self, samples: Iterable[RefusedSample], *, step: int) -> None:
        """Appends the `samples` that the file does not have, up to `MOST_NAMED` lines in all.

        Raises:
            OSError: the file cannot be written.
        """
        for sample in samples:
            values = asdict(sample)
            name = tuple(values[part] for part in _IDENTITY)
            if name not in self._known and len(self._known) < MOST_NAMED:
                self._known.add(name)
                self._lines.write({"step": step, **values})

    def close(self) -> None:
        self._lines.close()


def _known_samples(path: Path) -> Iterable[tuple[Any, ...]]:
    """(dataset, shard, key, reason) of each refused sample in the file `path`."""
    if not path.exists():
        return
    with explain_write_errors(path):
        content = path.read_bytes()
    for line in content.split(b"\n"):
        try:
            values = parse_json(line)
            yield tuple(str(values[part]) for part in _IDENTITY)
        except (ValueError, LookupError, TypeError):
            continue  # the empty last line, or a damaged one, whose sample is then written again


ENVIRONMENT_FILE = "environment.jsonl"
_PACKAGES = ("torch", "megatron-core", "megatron-energon", "transformer-engine")


def environment(*, step: int, layout: str) -> dict[str, Any]:
    """Content of the line of `environment.jsonl` for a start after `step` steps."""
    kind = torch.cuda.get_device_name() if device().type == "cuda" else "CPU"
    return {
        "step": step,
        "software": SOFTWARE,
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device().type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{dist.get_world_size()} x {kind}",
        "layout": layout,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
