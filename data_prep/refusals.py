"""Reasons why samples are refused, and how many were refused for each."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

from dit.safe_writing import write_atomically

_LONGEST = 120  # characters of a value in a message
_FEW = 5  # refused files that a message names, each with its reason


class PrepError(ValueError):
    """An error that the user must correct; its message says how."""


class Reason(StrEnum):
    """Reasons why a sample is refused; the summary counts each."""

    EMPTY = "file is empty"
    UNREADABLE = "file cannot be read"
    NO_IMAGE = "file is no image of a known format"
    DAMAGED = "image is damaged or cut short"
    TOO_LARGE = "image is suspiciously large"
    TOO_SMALL = "image is smaller than size_multiple"
    SCALED_AWAY = "image is smaller than size_multiple once it is scaled down"
    PIXELS = "pixel values have no known range"
    NO_VIDEO = "file is no video of a known format"
    VIDEO_DAMAGED = "video is damaged or cut short"
    CHANGING = "size changes (or pixel aspect, rotation, stated colours) within a video"
    TOO_SHORT = "video has too few frames"
    NOT_FETCHED = "address cannot be fetched"
    BAD_ARCHIVE = "archive is damaged, cut short or compressed"
    CHANGED = "file has changed since it was planned"
    CRASHED = "reading it kills the process"
    BAD_MASK = "mask of the loss cannot be used"
    NO_REFERENCE = "control picture or video is missing"
    BAD_REFERENCE = "control picture or video cannot be used"
    NO_REJECTED = "rejected picture or video is missing"
    BAD_REJECTED = "rejected picture or video cannot be used"
    NO_CAPTION = "no caption"
    BAD_CAPTION = "caption file cannot be used"
    BAD_WEIGHT = "loss_weight is no number that can be used"
    OTHER_MODEL = "sample is of another model than the others"
    NO_SOUND = "sound is missing or cannot be used"
    NOT_FINITE = "latent has NaN or Inf"


class RefusedError(Exception):
    """The error that a sample cannot be packed, with the reason and details."""

    def __init__(self, reason: Reason, detail: str):
        self.reason, self.detail = reason, printable(detail)
        super().__init__(f"{reason}: {detail}")


def printable(name: str) -> str:
    """`name` as text that can be printed; bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def short_repr(value: Any) -> str:
    """A short text for `value`, which may be of any size and depth, for a message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    limited = reprlib.Repr()
    limited.maxlevel, limited.maxstring, limited.maxother = 2, _LONGEST, _LONGEST
    try:
        return limited.repr(value)[:_LONGEST]
    except ValueError:  # Python writes no integer of so many digits
        return f"a huge {type(value).__name__}"


class Refusals:
    """The refused samples, by reason."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, str]]] = {}  # reason -> source and detail

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def add(self, source: str, reason: str, detail: str) -> None:
        self._found.setdefault(reason, []).append((source, detail))

    @property
    def counts(self) -> dict[str, int]:
        """Number of refused samples by reason, most frequent first."""
        return dict(Counter({reason: len(of) for reason, of in self._found.items()}).most_common())

    @property
    def lines(self) -> list[str]:
        """A line for each reason, with the number of samples and their files.

        It names every file if at most `_FEW` samples are refused in all, else one file.
        """
        lines = list[str]()
        for reason, count in self.counts.items():
            shown = sorted(self._found[reason])[: _FEW if len(self) <= _FEW else 1]
            names = ", ".join(f"{source} ({detail})" for source, detail in shown)
            lines.append(f"{count} x {reason}{':' if count == len(shown) else ', such as'} {names}")
        return lines

    @property
    def sources(self) -> set[str]:
        """Paths of the files whose samples were refused."""
        return {source for of in self._found.values() for source, _ in of}

    def write(self, path: Path) -> None:
        """Writes the refused samples to `path`, each as JSON with source, reason and detail."""
        found = sorted((s, r, d) for r, of in self._found.items() for s, d in of)
        lines = (json.dumps({"source": s, "reason": r, "detail": d}) + "\n" for s, r, d in found)
        write_atomically(path, "".join(lines).encode())

    def check(self, *, total: int, max_fraction: float, kept: bool = True) -> None:
        """Checks that not too many of `total` samples were refused.

        If `kept` is true, the message says that the samples packed so far are kept for the next
        run.

        Raises:
            PrepError: nothing is left, or more than `max_fraction` of `total` samples were refused.
        """
        reasons = "; ".join(self.lines)
        where = "refused.jsonl in the output folder names each file"
        if not total:
            raise PrepError(
                "nothing was packed: all files that were found are left out, by num_repeats or"
                " skip_empty_caption of --dataset_config, or as control or rejected pictures;"
                " change these keys, or add other files"
            )
        if len(self) == total:
            raise PrepError(
                f"nothing was packed: all {total} files were refused ({reasons}); {where}. Repair"
                " them, or give other files"
            )
        if len(self) > max_fraction * total:
            raise PrepError(
                f"{len(self)} of {total} files were refused ({reasons}), more than"
                f" --max_bad_fraction {max_fraction} allows; {where}. Repair or remove them, or"
                " raise --max_bad_fraction, and run the same command again"
                + (": what is packed is kept" if kept else "")
            )
