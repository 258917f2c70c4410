"""Samples that the run has left out: which, and why.

RUN/refused_samples.jsonl has one JSON object for each, the first 10,000 of them:

    step      at which the run knew of it
    key       of the sample in its shard
    shard     relative to the folder of the dataset
    dataset   the folder
    reason    one of dit/data/rejections.py
    detail    the values that led to it

A sample that is refused in each pass is there once, also after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dit.data.rejections import MOST_NAMED, RefusedSample
from dit.json_text import parse_json
from dit.train.metrics.jsonl import JsonlWriter, writing

FILE = "refused_samples.jsonl"
_NAMES = ("dataset", "shard", "key", "reason")


class RefusedFile:
    """The file, which only the first rank writes."""

    def __init__(self, folder: Path, *, start: int):
        """Goes on after step `start`."""
        self.path = folder / FILE
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
