"""Statistics of a plan: counts, histograms, expected bytes, fill of packs, loss by cropping."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from data_prep.inspect.duplicates import Duplicates
from data_prep.media.clips import Entry
from data_prep.media.resizing import Placement, Sizing
from data_prep.refusals import Refusals, RefusedError
from dit.bin_packing import mean_fill
from dit.codecs.dataset_card import CodecError, read_card
from dit.codecs.sound import SoundCodec

CAPACITIES = (4096, 16384, 32768)  # tokens in one pack, for which packs are simulated
_SOUND_BYTES = 4  # float32
_BUFFER = 100  # samples that wait for a pack, as `dataset.packing_buffer_size`


class Judged(StrEnum):
    """How the files of a plan were checked; the value is shown to the user."""

    DECODING = "decoding"
    HEADERS = "headers alone; damage further inside shows when they are packed"


@dataclass
class PlanStatistics:
    """Counts and histograms of a plan, collected sample by sample."""

    text_tokens: Callable[[str], int]
    latent_bytes: float  # of one token
    text_bytes: int  # of one text token
    longest_text: int  # tokens of a caption that are encoded, at most
    text_rows: Callable[[str], int]  # in the shards
    extra_bytes: Callable[..., int]  # of a sample, as `Codec.extra_bytes`
    patch: int  # latent cells along one side of a token
    stride: int  # pixels along one side of a cell
    sound: SoundCodec | None = None
    samples: int = 0
    seconds: float = 0.0  # of sound
    judged_by: Judged = Judged.HEADERS
    cropped: Mapping[str, Any] = field(default_factory=dict)  # as CropStatistics.summary
    notes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Refusals = field(default_factory=Refusals)
    sizes: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # frames, height, width
    histograms: dict[str, Counter[float]] = field(default_factory=dict)
    tokens: int = 0
    bytes: float = 0
    cut: int = 0  # captions that are too long, by an estimate of their tokens
    duplicates: Duplicates = field(default_factory=Duplicates)
    lengths: Counter[int] = field(default_factory=Counter)  # tokens -> samples

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
        if self.sound is not None and entry.sound is not None:
            self.seconds += entry.sound.seconds * entry.repeats
            count = round(entry.sound.seconds * self.sound.rate)
            bytes_ += self.sound.frames_of(count) * self.sound.channels * _SOUND_BYTES
        self.bytes += bytes_ * entry.repeats
        self.lengths[entry.tokens] += entry.repeats

    def _bin(self, name: str, value: float) -> None:
        low = 2 ** math.floor(math.log2(value)) if value > 0 else 0
        self.histograms.setdefault(name, Counter())[low] += 1

    @property
    def summary(self) -> dict[str, Any]:
        """The counts by name, for JSON files."""
        return {
            "judged_by": str(self.judged_by),
            "samples": self.samples,
            "refused": self.refusals.counts,
            "notes": dict(self.notes.most_common()),
            "tokens": self.tokens,
            "patch_spatial": self.patch,
            "expected_bytes": round(self.bytes),
            "cropped": dict(self.cropped),
            **({} if self.sound is None else {"seconds_of_sound": round(self.seconds, 3)}),
            **self.duplicates.summary,
        }

    @property
    def token(self) -> str:
        """A phrase for the user: how many pixels a token covers."""
        side = self.patch * self.stride
        return f"each of {side} x {side} pixels (model.patch_spatial={self.patch})"

    def fill(self, capacity: int) -> float:
        """Mean fraction of a pack of `capacity` tokens that the loader fills with samples."""
        fitting = {n: count for n, count in self.lengths.items() if 0 < n <= capacity}
        return mean_fill(fitting, capacity=capacity, buffer=_BUFFER) if fitting else 0.0

    def too_long(self, capacity: int) -> int:
        """Number of samples that are longer than a pack of `capacity` tokens."""
        return sum(count for n, count in self.lengths.items() if n > capacity)


@dataclass
class CropStatistics:
    """Adds up the area that cropping removes from samples and their control pictures."""

    others: Mapping[str, Sizing] = field(default_factory=dict)
    """Other rules for sizes that may crop less, by the option that selects them."""
    total: int = 0  # samples and control pictures
    cropped: int = 0  # those of them that lose some area
    lost: float = 0.0  # sum of the fractions of their areas that are lost
    most: float = 0.0  # the largest fraction that is lost
    worst: str = ""  # the file that loses it, and its sizes
    samples: int = 0
    lost_with: Counter[str] = field(default_factory=Counter)  # `lost` of samples by other options
    _known: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Adds a sample and its control pictures; refused samples are ignored."""
        if entry.size is None or entry.resized is None:
            return
        file = (entry.width, entry.height)
        self._add(entry.source, file, Placement(entry.resized, entry.size))
        for one in entry.references:
            self._add(one.name, one.resized, Placement(one.resized, one.size))
        if file not in self._known:
            self._known[file] = {name: _lost(rule, file) for name, rule in self.others.items()}
        self.samples += 1
        self.lost_with.update(self._known[file])

    def _add(self, name: str, file: tuple[int, int], place: Placement) -> None:
        self.total += 1
        self.cropped += place.lost > 0
        self.lost += place.lost
        if place.lost > self.most:
            sizes = [file, place.resized, place.size]
            shown = ("{} x {}".format(*size) for size in dict.fromkeys(sizes))
            self.most, self.worst = place.lost, f"{name}: {' -> '.join(shown)}"

    @property
    def summary(self) -> dict[str, Any]:
        """The statistics by name for the dataset card; empty if nothing is cropped.

        Areas are fractions of a picture.
        """
        if not self.cropped:
            return {}
        mean = self.lost / self.total
        less = {name: lost / self.samples for name, lost in self.lost_with.items()}
        return {
            "cropped": self.cropped,
            "of": self.total,
            "what": "samples" if self.total == self.samples else "samples and control pictures",
            "mean_area": round(mean, 4),
            "largest_area": round(self.most, 4),
            "worst": self.worst,
            "less_with": {n: round(each, 4) for n, each in less.items() if each < 0.8 * mean},
        }


def crop_line(summary: Mapping[str, Any]) -> str:
    """A sentence about `CropStatistics.summary`, with the options that crop less; may be empty."""
    if not summary:
        return ""
    less = (f"{name} would take {lost:.1%}" for name, lost in summary["less_with"].items())
    found = (
        f"{summary['cropped']:,} of {summary['of']:,} {summary['what']} are cropped, which takes"
        f" {summary['mean_area']:.1%} of the area on average and {summary['largest_area']:.1%} at"
        f" most ({summary['worst']})"
    )
    return "; ".join((found, *less))


def crop_line_of(folder: Path) -> str:
    """A sentence about cropping in the dataset in `folder`; empty if its card has no data."""
    with suppress(CodecError, LookupError, TypeError, ValueError):  # other checks report the card
        return crop_line(read_card(folder)["cropped"])
    return ""


def _lost(rule: Sizing, file: tuple[int, int]) -> float:
    try:
        return rule.place(*file).lost
    except RefusedError:  # a refused sample loses its whole area
        return 1.0
