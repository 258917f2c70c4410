"""Statistics of a plan: counts, histograms, expected bytes, how full packs get, cropped pixels."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from data_prep.inspect.duplicates import Duplicates
from data_prep.media.clips import Entry
from data_prep.refusals import Refusals

CAPACITIES = (4096, 16384, 32768)  # tokens in one pack, for which packs are simulated
_BUFFER = 100  # samples that are packed together, as `dataset.packing_buffer_size`


class Judged(StrEnum):
    """How the files of a plan were checked."""

    DECODING = "decoding"
    HEADERS = "headers alone; damage further inside shows when they are packed"


@dataclass
class PlanStatistics:
    """Sums over a plan, in memory that does not grow with its length."""

    text_tokens: Callable[[str], int]
    latent_bytes: float  # of one token
    text_bytes: int  # of one text token
    longest_text: int  # tokens of a caption that are encoded, at most
    text_rows: Callable[[str], int]  # in the shards
    extra_bytes: Callable[..., int]  # of a sample, as `Codec.extra_bytes`
    patch: int  # latent cells along one side of a token
    stride: int  # pixels along one side of a cell
    samples: int = 0
    judged_by: Judged = Judged.HEADERS
    notes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Refusals = field(default_factory=Refusals)
    sizes: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # frames, height, width
    histograms: dict[str, Counter[float]] = field(default_factory=dict)
    tokens: int = 0
    bytes: float = 0
    cut: int = 0  # captions that are too long, by an estimate of their tokens
    duplicates: Duplicates = field(default_factory=Duplicates)
    packs: dict[int, list[int]] = field(default_factory=dict)  # capacity -> packs, tokens in them
    _buffer: list[int] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        if entry.refused:
            self.refusals.add(entry.source, entry.refused, entry.detail)
            return
        self.samples += entry.repeats
        self.kinds[entry.kind] += 1
        self.notes.update(entry.notes)
        width, height = entry.size or (entry.width, entry.height)
        frames = max(1, len(entry.keep))
        self.sizes[frames, height, width] += 1
        self._bin("side of the file, root of width x height", (entry.width * entry.height) ** 0.5)
        if entry.duration is not None:
            self._bin("duration of the file, seconds", entry.duration)
        self._bin("tokens in a sample", entry.tokens)
        self._bin("caption, characters", len(entry.caption))
        self.tokens += entry.tokens * entry.repeats
        length = self.text_tokens(entry.caption)
        self.cut += length > self.longest_text
        bytes_ = entry.tokens * self.latent_bytes + self.text_rows(entry.caption) * self.text_bytes
        bytes_ += self.extra_bytes(frames=frames, height=height, width=width)
        self.bytes += bytes_ * entry.repeats
        self._buffer.append(entry.tokens)
        if len(self._buffer) == _BUFFER:
            self._pack()

    def _bin(self, name: str, value: float) -> None:
        low = 2 ** math.floor(math.log2(value)) if value > 0 else 0
        self.histograms.setdefault(name, Counter())[low] += 1

    def _pack(self) -> None:
        for capacity in CAPACITIES:
            packs = self.packs.setdefault(capacity, [0, 0, 0])
            fitting = [n for n in self._buffer if n <= capacity]
            packs[0] += packs_of(fitting, capacity=capacity)
            packs[1] += sum(fitting)
            packs[2] += len(self._buffer) - len(fitting)
        self._buffer.clear()

    def finish(self) -> None:
        """Packs the rest of the buffer."""
        if self._buffer:
            self._pack()

    @property
    def summary(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {
            "judged_by": str(self.judged_by),
            "samples": self.samples,
            "refused": self.refusals.counts,
            "notes": dict(self.notes.most_common()),
            "tokens": self.tokens,
            "patch_spatial": self.patch,
            "expected_bytes": round(self.bytes),
            **self.duplicates.summary,
        }

    @property
    def token(self) -> str:
        """The size of a token, on which all counts of tokens depend, in words."""
        side = self.patch * self.stride
        return f"each of {side} x {side} pixels (model.patch_spatial={self.patch})"

    def fill(self, capacity: int) -> float:
        """Mean fraction of a pack that is filled with samples."""
        packs, tokens, _ = self.packs.get(capacity, [0, 0, 0])
        return tokens / (packs * capacity) if packs else 0.0

    def too_long(self, capacity: int) -> int:
        """Samples that are longer than a pack of this capacity."""
        return self.packs.get(capacity, [0, 0, 0])[2]


def packs_of(lengths: Iterable[int], *, capacity: int) -> int:
    """Number of packs that best-fit decreasing needs."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else capacity
        bisect.insort(rooms, room - length)
    return len(rooms)


@dataclass
class CropStatistics:
    """How many pixels pictures lose because sides become multiples of a patch."""

    total: int = 0  # samples with a size
    cropped: int = 0
    largest: int = 0  # pixels that a side loses

    def add(self, entry: Entry) -> None:
        """Counts a sample; only those that keep their scale lose pixels by whole patches alone."""
        if entry.size is None or entry.resized is None:
            return
        self.total += 1
        if tuple(entry.resized) == (entry.width, entry.height):
            lost = max(a - b for a, b in zip(entry.resized, entry.size, strict=True))
            self.cropped += lost > 0
            self.largest = max(self.largest, lost)

    def notices(self, size_multiple: int | None, cell: int) -> list[str]:
        """A notice with the option that crops less, if any; a latent cell has `cell` pixels."""
        if not self.cropped or size_multiple is None:
            return []
        remedy = (
            f"; for a model with model.patch_spatial=1, --size_multiple {cell} crops less"
            if size_multiple > cell
            else ""
        )
        return [
            f"{self.cropped} of {self.total} samples lose up to {self.largest} pixels of a side,"
            f" because sides become multiples of --size_multiple {size_multiple}{remedy}"
        ]
