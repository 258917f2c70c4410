"""Writes the results of the workers into shards and ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.engine.block_worker import Block, EncodedSample, RefusedResult
from data_prep.engine.ranks import Ranks
from data_prep.media.clips import Entry
from data_prep.planning.plan import PackingPlan
from data_prep.planning.splits import Split
from data_prep.writing.dataset_folder import LEDGER
from data_prep.writing.ledger import (
    EarlierSamples,
    Ledger,
    LedgerProgress,
    digest_of,
    ledger_name,
    read_progress,
)
from data_prep.writing.pack_options import PackOptions
from data_prep.writing.tar_shards import ShardSeries


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBlocks:
    """The blocks of a plan that one rank packs, each a tuple of lines."""

    plan: PackingPlan
    size: int
    ranks: Ranks

    @property
    def total(self) -> int:
        """Number of samples in the blocks of this rank."""
        return sum(len(block) for block in self.after(0))

    def after(self, samples: int) -> Iterator[tuple[bytes, ...]]:
        """Yields the blocks of this rank that begin at or after its sample number `samples`."""
        blocks = self.plan.blocks(self.size, rank=self.ranks.rank, world=self.ranks.world)
        return (block for number, block in enumerate(blocks) if number * self.size >= samples)


@dataclass(kw_only=True)
class Writer:
    """Writes the shards of all splits, and the ledger, of one rank."""

    folder: Path
    options: PackOptions
    ranks: Ranks
    _series: dict[Split, ShardSeries] = field(default_factory=dict)
    _ledger: Ledger | None = None
    _earlier: EarlierSamples | None = None

    @property
    def _path(self) -> Path:
        return self.folder / LEDGER / ledger_name(self.ranks.rank, self.ranks.world)

    def progress(self, share: RankBlocks) -> LedgerProgress:
        """What an earlier run has written of the samples in `share`."""
        return read_progress(self._path, block=share.size, total=share.total)

    @contextmanager
    def resumed(self, progress: LedgerProgress) -> Iterator[None]:
        """Context in which `write` works: it opens shards and ledger to continue after `progress`.

        Bytes that an earlier run wrote after `progress` are cut off.
        """
        self._earlier = EarlierSamples(self.folder)
        prefix = "shard-" if self.ranks.world == 1 else f"rank{self.ranks.rank}-"
        with ExitStack() as stack:
            for split in Split:
                series = ShardSeries(
                    self.folder / split,
                    max_samples=self.options.shard_size,
                    max_bytes=self.options.max_shard_bytes,
                    prefix=prefix,
                )
                counts = progress.counts.get(split, {})
                # All shards but the last, which is continued.
                whole = {name: counts[name] for name in sorted(counts)[:-1]}
                series.resume(whole, progress.ends.get(split, [0]))
                self._series[split] = stack.enter_context(series)
            self._ledger = stack.enter_context(closing(Ledger(self._path, keep=progress.size)))
            yield

    def without_earlier(self, block: Sequence[bytes]) -> Block:
        """`block`, with None in place of samples that are copied from an earlier run."""
        assert self._earlier is not None
        has = self._earlier.has
        return tuple(None if has(line) else line for line in block)

    def write(
        self, block: Sequence[bytes], outcomes: Sequence[EncodedSample | RefusedResult | None]
    ) -> None:
        """Writes the samples of a block into shards, then their lines into the ledger.

        `outcomes` has the worker's result for each line of `block`; None means that the sample is
        copied from an earlier run.
        """
        assert self._ledger is not None
        lines = [self._write(*pair) for pair in zip(block, outcomes, strict=True)]
        # Before the ledger, whose lines say that the bytes are in the shards.
        for series in self._series.values():
            series.flush()
        self._ledger.append(lines)

    def _write(self, line: bytes, outcome: EncodedSample | RefusedResult | None) -> dict[str, Any]:
        """Writes a sample, with its repeats, into the shards of its split; returns its ledger line.

        `line` is its line of the plan. A refused sample gets a ledger line only.
        """
        entry, of = Entry.from_line(line), digest_of(line)
        if isinstance(outcome, RefusedResult):
            refused = {"refused": outcome.reason, "detail": outcome.detail}
            return {"of": of, "source": entry.source, **refused}
        split = self.options.split.split_of(entry.group)
        series = self._series[split]
        if outcome is None:
            assert self._earlier is not None
            about, copies = self._earlier.copy(of)
            places = [series.copy(members) for members in copies]
        else:
            keys = [entry.key] + [f"{entry.key}r{n}" for n in range(1, entry.repeats)]
            places = [series.write(key, outcome.parts) for key in keys]
            about = {"size": outcome.size, "notes": outcome.notes, "moments": outcome.moments}
            if outcome.psnr is not None:
                about["psnr"] = outcome.psnr
        return {"of": of, "in": [(split, *place) for place in places], **about}
