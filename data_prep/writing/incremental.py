"""Samples of an earlier packing over other files: those with an unchanged plan are copied.

When files have changed, the packed samples move to `.ledger/earlier-N`, and the new packing copies
from there what it can. So no outdated sample stays, and none is encoded twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.planning.splits import Split
from data_prep.refusals import PrepError
from data_prep.writing.dataset_folder import META, remove
from data_prep.writing.ledger import LEDGER, digest_of, read_lines
from dit.safe_writing import TEMPORARY

WHITENING_NAME = "whitening.json"
_EARLIER = "earlier-"


def set_aside(folder: Path, *, generation: int) -> None:
    """Moves the packed samples to `.ledger/earlier-N`; continues where it was killed."""
    if (folder / META).exists():
        remove(folder / META)
    aside = folder / LEDGER / f"{_EARLIER}{generation}"
    aside.mkdir(exist_ok=True)
    moved = [*(folder / split for split in Split), *(folder / LEDGER).glob("rank-*.jsonl")]
    for path in [*moved, folder / LEDGER / WHITENING_NAME]:
        if path.exists():
            path.rename(aside / path.name)


def remove_earlier(folder: Path) -> None:
    """Removes what was set aside, when the new dataset is complete."""
    for path in (folder / LEDGER).glob(f"{_EARLIER}*"):
        shutil.rmtree(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FoundSample:
    places: tuple[tuple[Path, int, int], ...]  # shard, first byte, end
    about: dict[str, Any]


class EarlierSamples:
    """Samples that were set aside, by the digest of their line in the plan."""

    def __init__(self, folder: Path):
        self._found: dict[str, _FoundSample] = {}
        whitening = folder / LEDGER / WHITENING_NAME
        for aside in sorted((folder / LEDGER).glob(f"{_EARLIER}*")):
            # Latents of another whitening cannot be used.
            if _content(aside / WHITENING_NAME) == _content(whitening):
                for path in sorted(aside.glob("rank-*.jsonl")):
                    self._found.update(_samples(aside, path))

    def has(self, line: bytes) -> bool:
        return bool(self._found) and digest_of(line) in self._found

    def copy(self, digest: str) -> tuple[dict[str, Any], list[bytes]]:
        """The line of a sample in the ledger, and the bytes of each of its copies in the shards.

        Raises:
            PrepError: the bytes are lost.
        """
        found = self._found[digest]
        return found.about, [_bytes(*place) for place in found.places]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _samples(aside: Path, ledger: Path) -> Iterator[tuple[str, _FoundSample]]:
    ends: dict[tuple[str, str], int] = {}
    for line, _ in read_lines(ledger):
        places = []
        for split, shard, end in line.pop("in", ()):
            places.append((aside / split / shard, ends.get((split, shard), 0), end))
            ends[split, shard] = end
        if places:
            yield line.pop("of"), _FoundSample(places=tuple(places), about=line)


def _bytes(shard: Path, start: int, end: int) -> bytes:
    path = shard if shard.exists() else shard.with_name(shard.name + TEMPORARY)
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            content = stream.read(end - start)
    except OSError as error:
        raise PrepError(f"{path} cannot be read ({error}); start anew with --overwrite") from error
    if len(content) != end - start:
        raise PrepError(f"{path} has lost its end; start anew with --overwrite")
    return content
