"""The ledgers of all ranks -> what was packed, and what was refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.planning.splits import Split
from data_prep.refusals import Refusals
from data_prep.writing.ledger import LEDGER, ledger_name, read_lines

SIZES_IN_CARD = 20  # most frequent sizes; the first is the default of generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a packing wrote, refused and ignored."""

    shards: Mapping[Split, Mapping[str, int]]  # samples of each shard by file name
    bytes_written: int
    refusals: Refusals
    ignored: Mapping[str, int]  # files that are no media, by kind
    notes: Mapping[str, int]
    sizes: list[dict[str, int]]
    measured: Mapping[str, float]  # mean and std of the latents
    psnr: Mapping[str, float]  # least, mean, and number of verified samples
    cropped: Mapping[str, Any] = field(default_factory=dict)  # as CropStatistics.summary

    @property
    def refused(self) -> Mapping[str, int]:
        return self.refusals.counts

    @property
    def samples(self) -> Counter[Split]:
        return Counter({split: sum(counts.values()) for split, counts in self.shards.items()})


class _Sums:
    """Mean and standard deviation of all latents, from count, mean and mean square of each."""

    def __init__(self) -> None:
        self.count, self.total, self.square = 0, 0.0, 0.0

    def add(self, count: int, mean: float, square: float) -> None:
        self.count += count
        self.total += count * mean
        self.square += count * square

    @property
    def measured(self) -> dict[str, float]:
        if not self.count:
            return {}
        mean, square = self.total / self.count, self.square / self.count
        return {"mean": round(mean, 6), "std": round(math.sqrt(max(0, square - mean**2)), 6)}


def summarize(folder: Path, *, world: int, ignored: Mapping[str, int]) -> Summary:
    """Adds up the ledgers of a packing; only refused samples are kept in memory."""
    shards: dict[Split, dict[str, int]] = {split: {} for split in Split}
    ratios = list[float]()
    notes, sizes, sums, refusals = Counter[str](), Counter[tuple[int, ...]](), _Sums(), Refusals()
    for rank in range(world):
        for line, _ in _lines(folder / LEDGER / ledger_name(rank, world)):
            if "refused" in line:
                refusals.add(line["source"], line["refused"], line["detail"])
                continue
            for split, shard, _ in line["in"]:
                counts = shards[Split(split)]
                counts[shard] = counts.get(shard, 0) + 1
                sizes[tuple(line["size"])] += 1
            notes.update(line["notes"])
            if "psnr" in line:
                ratios.append(line["psnr"])
            sums.add(*line["moments"])
    used = {split: dict(sorted(counts.items())) for split, counts in shards.items() if counts}
    return Summary(
        shards=used,
        bytes_written=sum((folder / s / name).stat().st_size for s in used for name in used[s]),
        refusals=refusals,
        ignored=ignored,
        notes=dict(notes),
        sizes=[
            {"num_frames": frames, "height": height, "width": width, "samples": count}
            for (frames, height, width), count in sizes.most_common(SIZES_IN_CARD)
        ],
        measured=sums.measured,
        psnr=_of_ratios(ratios),
    )


def _of_ratios(ratios: list[float]) -> dict[str, float]:
    if not ratios:
        return {}
    mean = round(sum(ratios) / len(ratios), 2)
    return {"least": min(ratios), "mean": mean, "samples": len(ratios)}


def _lines(path: Path) -> Any:
    return read_lines(path) if path.exists() else ()
