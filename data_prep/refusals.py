"""What was not packed, and why."""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from pathlib import Path

from data_prep.files import write_whole


class PrepError(ValueError):
    """The user must change something; the message says what."""


class Reason(StrEnum):
    """Why a file was refused; the summary counts each."""

    EMPTY = "file is empty"
    UNREADABLE = "file cannot be read"
    NO_IMAGE = "file is no image of a known format"
    DAMAGED = "image is damaged or cut short"
    TOO_LARGE = "image is suspiciously large"
    TOO_SMALL = "image is smaller than size_multiple"
    PIXELS = "pixel values have no known range"
    NO_CAPTION = "no caption"
    BAD_CAPTION = "caption file cannot be used"
    NOT_FINITE = "latent has NaN or Inf"


class RefusedError(Exception):
    """One file cannot be packed."""

    def __init__(self, reason: Reason, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class Refusals:
    """The refused files by source; a file is counted once however often it is read."""

    def __init__(self) -> None:
        self._by_source: dict[str, RefusedError] = {}

    def __contains__(self, source: str) -> bool:
        return source in self._by_source

    def __len__(self) -> int:
        return len(self._by_source)

    def add(self, source: str, refused: RefusedError) -> None:
        self._by_source[source] = refused

    @property
    def counts(self) -> dict[str, int]:
        """RefusedError files by reason, most frequent first."""
        counter = Counter(str(refused.reason) for refused in self._by_source.values())
        return dict(counter.most_common())

    def write(self, path: Path) -> None:
        """One JSON object a line: source, reason, detail."""
        lines = (
            json.dumps({"source": source, "reason": refused.reason, "detail": refused.detail})
            for source, refused in sorted(self._by_source.items())
        )
        write_whole(path, "".join(line + "\n" for line in lines).encode())

    def check(self, *, total: int, max_fraction: float) -> None:
        """Stops a run that loses too much.

        Raises:
            PrepError: nothing is left, or more than `max_fraction` of `total` files were refused.
        """
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.counts.items())
        where = "refused.jsonl in the output folder names each file"
        if len(self) == total:
            raise PrepError(
                f"nothing was packed: all {total} files were refused ({reasons}); {where}"
            )
        if len(self) > max_fraction * total:
            raise PrepError(
                f"{len(self)} of {total} files were refused ({reasons}), more than"
                f" --max_bad_fraction {max_fraction} allows; {where}. Repair or remove them, or"
                " raise --max_bad_fraction, and run again with --overwrite"
            )
