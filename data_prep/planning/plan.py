"""Reads and writes `plan.jsonl`, which has one line for each sample, in the order of encoding.

The samples are sorted by a hash of their file ("packing order"), so each shard has samples from
many folders. Sorting needs 16 bytes of memory for each sample.
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from data_prep.media.clips import Entry
from data_prep.planning.splits import Split, SplitFractions, position_of
from data_prep.refusals import PrepError
from dit.safe_writing import TEMPORARY, AtomicFile


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPlan:
    """A complete `plan.jsonl`: its path, a digest of its content, and its number of samples."""

    path: Path
    digest: str
    total: int  # samples, refused ones included

    @property
    def entries(self) -> Iterator[Entry]:
        """Yields all samples of the plan, in packing order."""
        return (Entry.from_line(line) for (line,) in self.blocks(1))

    def blocks(self, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[bytes, ...]]:
        """Yields blocks of `size` lines of the plan: every `world`-th block, from number `rank` on.

        The last block may be shorter.
        """
        with self.path.open("rb") as lines:
            number = 0
            while block := tuple(islice(lines, size)):
                if number % world == rank:
                    yield block
                number += 1


def read_plan(path: Path) -> PackingPlan:
    """Reads the plan at `path`, which an earlier run has written."""
    digest, total = hashlib.blake2b(digest_size=16), 0
    with path.open("rb") as lines:
        for line in lines:
            digest.update(line)
            total += 1
    return PackingPlan(path=path, digest=digest.hexdigest(), total=total)


def write_plan(entries: Iterable[Entry], path: Path, split: SplitFractions | None) -> PackingPlan:
    """Writes `entries`, sorted into packing order, as the plan at `path`.

    If `split` is not None, each of train, val and test with a fraction above 0 must get a sample.

    Raises:
        PrepError: two files have the same key, or one of train, val and test gets no sample.
    """
    spool = path.with_name(path.name + ".spool" + TEMPORARY)
    offsets, positions, found = array("Q", [0]), array("d"), Counter[Split]()
    try:
        with spool.open("wb") as stream:
            for entry in entries:
                offsets.append(offsets[-1] + stream.write(entry.to_line().encode()))
                positions.append(position_of(entry.group))
                if split is not None:
                    found[split.split_of(entry.group)] += not entry.refused
        if split is not None and found.total():
            split.check_found(found)
        return _sorted(spool, path, offsets, np.array(positions))
    finally:
        spool.unlink(missing_ok=True)


def refuse(plan: PackingPlan, outcomes: Iterable[tuple[str, str] | None]) -> PackingPlan:
    """Rewrites the file of `plan` with further refusals, and returns the new plan.

    `outcomes` has (reason, detail) for each sample in order, or None for accepted ones.
    """
    with AtomicFile(plan.path) as file:
        for (line,), refusal in zip(plan.blocks(1), outcomes, strict=True):
            if refusal is not None:
                reason, detail = refusal
                line = replace(Entry.from_line(line), refused=reason, detail=detail).to_line()
                line = line.encode()
            file.stream.write(line)
    return read_plan(plan.path)


def _sorted(spool: Path, path: Path, offsets: array[int], positions: np.ndarray) -> PackingPlan:
    digest = hashlib.blake2b(digest_size=16)
    order = np.argsort(positions, kind="stable")  # samples of a file stay in their order
    with AtomicFile(path) as file, spool.open("rb") as stream:
        if len(order):  # an empty file cannot be mapped
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as lines:
                for line in _checked(lines, offsets, order, positions):
                    digest.update(line)
                    file.stream.write(line)
    return PackingPlan(path=path, digest=digest.hexdigest(), total=len(order))


def _checked(
    lines: mmap.mmap, offsets: array[int], order: np.ndarray, positions: np.ndarray
) -> Iterator[bytes]:
    """Yields `lines` in the order `order`, and checks that their keys are unique as it goes.

    `lines` is the unsorted file, whose line i begins at `offsets[i]`. Equal keys have equal
    `positions`, so only samples at one position are compared.

    Raises:
        PrepError: two files have the same key.
    """
    neighbours: dict[str, str] = {}
    last = None
    for index in order.tolist():
        line = lines[offsets[index] : offsets[index + 1]]
        if positions[index] != last:
            neighbours, last = {}, positions[index]
        entry = Entry.from_line(line)
        other = neighbours.setdefault(entry.key, entry.source)
        if other != entry.source:
            raise PrepError(f"{other} and {entry.source} get the same key {entry.key}; rename one")
        yield line
