"""The area that pictures and videos lose to cropping, and the options that lose less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.media.clips import Entry
from data_prep.media.resizing import Placement, Sizing
from data_prep.refusals import RefusedError
from dit.codecs.dataset_card import CodecError, read_card


@dataclass
class CropStatistics:
    """The area that samples and their control pictures lose where they are cropped."""

    others: Mapping[str, Sizing] = field(default_factory=dict)
    """Options that may lose less, and the rule for sizes that each of them makes."""
    total: int = 0
    cropped: int = 0
    lost: float = 0.0  # sum of the parts of the areas
    most: float = 0.0  # of one of them
    worst: str = ""  # its file and sizes
    samples: int = 0
    lost_with: Counter[str] = field(default_factory=Counter)  # the same of samples, by option
    _known: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Counts a sample and its control pictures."""
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
        """For the card; empty where nothing is cropped."""
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
    """The `summary` of CropStatistics in words; empty where nothing is cropped."""
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
    """The same of a packed dataset; empty where its card does not say it."""
    with suppress(CodecError, LookupError, TypeError, ValueError):  # others name a damaged card
        return crop_line(read_card(folder)["cropped"])
    return ""


def _lost(rule: Sizing, file: tuple[int, int]) -> float:
    try:
        return rule.place(*file).lost
    except RefusedError:  # all of it
        return 1.0
