"""Samples that occur more than once: pictures that look alike, and captions that repeat.

Samples made from one file (with other captions, sizes, frames or repeats) are not duplicates.
"""

# F frames, H rows, W columns; N samples, U different hashes

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from html import escape

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from data_prep.inspect.html_pages import html_table
from dit.progress import counted

NEAR = 3
"""Most bits, of 64, in which the hashes of similar pictures may differ."""
_SIDE, _LOWEST = 32, 8
_FLAT = 1e-3  # fraction of its largest possible value below which a coefficient is only noise
_BANDS = NEAR + 1  # parts of 16 bits; hashes that differ in NEAR bits at most share one of them
_SHOWN = 100
_AHEAD = 1000
_BITS = np.array([value.bit_count() for value in range(256)], np.uint8)


class ComparedBy(StrEnum):
    """What is compared to find near duplicates; the value is shown to the user."""

    PIXELS = "pixels"
    LATENTS = "latents; --plan compares pixels, and may find others"
    NOTHING = ""


Looks = tuple[int, int]
"""Perceptual hashes, 64 bits each, of the first and the last frame of a clip."""


def looks_of(grey_FHW: Tensor) -> Looks | None:
    """Perceptual hashes of the first and last frame, which are close for clips that look alike.

    A frame is a grey picture, or a latent averaged over its channels. Returns None if one of the
    two shows no structure, such as a single colour.
    """
    first, last = (_hash(grey_FHW[index]) for index in (0, -1))
    return None if first is None or last is None else (first, last)


@cache
def _cosines() -> Tensor:
    """[8, 32]: the rows of the discrete cosine transform (DCT-II) from frequency 1 to 8."""
    frequency = torch.arange(1, _LOWEST + 1)[:, None]
    return torch.cos(math.pi / _SIDE * (torch.arange(_SIDE) + 0.5) * frequency)


def _hash(grey_HW: Tensor) -> int | None:
    """Perceptual hash (64 bits) of a picture; None if the picture has no structure.

    This is the hash of C. Zauner, "Implementation and Benchmarking of Perceptual Image Hash
    Functions". The picture is scaled to 32 x 32 pixels. Its discrete cosine transform has a
    coefficient for each of the 8 x 8 lowest frequencies above 0; a bit is 1 if the coefficient is
    above the median of these 64.
    """
    grey_HW = grey_HW.float()
    small_HW = interpolate(grey_HW[None, None], (_SIDE, _SIDE), mode="area")[0, 0]
    low = _cosines() @ small_HW @ _cosines().T
    if not low.abs().max() > _FLAT * _SIDE**2 * grey_HW.abs().max():
        return None
    bits = (low > low.median()).flatten().numpy()
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def near_groups(looks: Sequence[Looks | None]) -> list[list[int]]:
    """Groups of samples that look alike, each as a list of indices into `looks`.

    Samples that are connected by a chain of similar ones are in one group.
    """
    judged = [number for number, one in enumerate(looks) if one is not None]
    if not judged:
        return []
    hashes_N2 = np.array([looks[number] for number in judged], np.uint64)
    hashes_U2, which_N = np.unique(hashes_N2, axis=0, return_inverse=True)
    root = np.arange(len(hashes_U2))
    for one, other in _near_pairs(hashes_U2):
        root[_find(root, one)] = _find(root, other)
    groups: dict[int, list[int]] = {}
    for number, unique in zip(judged, which_N.ravel().tolist(), strict=True):
        groups.setdefault(_find(root, unique), []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def _find(root: np.ndarray, one: int) -> int:
    while root[one] != one:
        root[one] = root[root[one]]  # halves the path for the next search
        one = int(root[one])
    return one


def _near_pairs(hashes_U2: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of rows in which the hashes of both frames differ in at most NEAR bits.

    To be fast, it compares only rows that agree in one of the four parts (16 bits each) of the
    first frame's hash. Of rows that agree, sorted by this hash, each is compared only with the next
    `_AHEAD`, so some pairs may be missed if thousands agree.
    """
    found = list[tuple[int, int]]()
    for band in range(_BANDS):
        band_U = hashes_U2[:, 0] >> np.uint64(16 * band) & np.uint64(0xFFFF)
        order = np.lexsort((hashes_U2[:, 0], band_U))
        band_U, sorted_U2 = band_U[order], hashes_U2[order]
        place, ahead = np.arange(len(order) - 1), 1
        while ahead <= _AHEAD and len(place := place[band_U[place] == band_U[place + ahead]]):
            near = np.ones(len(place), bool)
            for frame in range(2):
                apart = sorted_U2[place, frame] ^ sorted_U2[place + ahead, frame]
                near &= _BITS[apart.view(np.uint8)].reshape(-1, 8).sum(-1) <= NEAR
            pairs = order[place[near]], order[place[near] + ahead]
            found += zip(*(side.tolist() for side in pairs), strict=True)
            ahead += 1
            place = place[place + ahead < len(order)]
    return found


@dataclass
class Duplicates:
    """Finds samples that look alike or share a caption: `add` every sample, then call `finish`."""

    names: list[str] = field(default_factory=list)
    captions: Counter[str] = field(default_factory=Counter)
    looks: list[Looks | None] = field(default_factory=list)
    by: ComparedBy = ComparedBy.PIXELS
    _first: dict[str, str] = field(default_factory=dict)  # caption -> the first file with it
    _shared: set[str] = field(default_factory=set)  # captions of several files
    groups: list[list[int]] = field(default_factory=list)
    group_of: dict[int, int] = field(default_factory=dict)
    """Index of a sample, in the order of `add` -> number of its group, from 1."""

    def add(self, name: str, caption: str, looks: Looks | None) -> None:
        self.names.append(name)
        self.captions[caption] += 1
        if self._first.setdefault(caption, name) != name:
            self._shared.add(caption)
        self.looks.append(looks)

    def finish(self) -> None:
        """Sets `groups` and `group_of` from the hashes of all samples that were added.

        Groups are sorted by size, largest first. A group whose samples all come from one file is
        left out.
        """
        found = near_groups(self.looks)
        several = [group for group in found if len({self.names[one] for one in group}) > 1]
        self.groups = sorted(several, key=len, reverse=True)
        self.group_of = {one: n for n, group in enumerate(self.groups, start=1) for one in group}

    @property
    def repeated(self) -> list[tuple[str, int]]:
        """Captions that samples of several files share, with the number of these samples."""
        return [found for found in self.captions.most_common() if found[0] in self._shared]

    def repeats_of(self, caption: str) -> int:
        """Number of samples with `caption` if several files have it; else 1."""
        return self.captions[caption] if caption in self._shared else 1

    @property
    def summary(self) -> dict[str, int]:
        """The counts of duplicates by name, for JSON files."""
        counts = {
            "repeated_captions": len(self.repeated),
            "samples_with_repeated_captions": sum(count for _, count in self.repeated),
        }
        if self.by:
            counts |= {
                "near_duplicate_groups": len(self.groups),
                "near_duplicates": sum(map(len, self.groups)),
            }
        return counts

    @property
    def lines(self) -> list[str]:
        """The counts of duplicates as sentences for the terminal."""
        found, said = self.summary, list[str]()
        if self.repeated:
            said.append(
                f"captions that repeat: {found['repeated_captions']}, in"
                f" {found['samples_with_repeated_captions']} of {len(self.names)} samples"
            )
        if self.groups:
            said.append(
                f"near duplicates: {found['near_duplicates']} samples look alike, in"
                f" {counted(len(self.groups), 'group')} (compared by {self.by})"
            )
        return said

    def html(self) -> str:
        """HTML that lists the largest groups of near duplicates and the most frequent captions."""
        parts = ["<h2>Near duplicates</h2>"]
        if not self.by:
            parts.append("<p>Not looked for: files were not decoded.</p>")
        elif not self.groups:
            parts.append(f"<p>None (compared by {self.by}).</p>")
        else:
            parts.append(f"<details><summary>{escape(self.lines[-1])}</summary>")
            for number, group in enumerate(self.groups[:_SHOWN], start=1):
                shown = ", ".join(escape(self.names[one]) for one in group[:_SHOWN])
                parts.append(f"<p>Group {number}, {len(group)} samples: {shown}</p>")
            parts.append("</details>")
        shown = "<p>None.</p>"
        if rows := [(n, caption[:200] or "(empty)") for caption, n in self.repeated[:_SHOWN]]:
            listed = html_table(("samples", "caption"), rows)
            shown = f"<details><summary>{escape(self.lines[0])}</summary>{listed}</details>"
        parts.append("<h2>Captions that repeat</h2>" + shown)
        return "\n".join(parts)
