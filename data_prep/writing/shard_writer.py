"""Results of the workers -> shards and ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from data_prep.engine.block_worker import Block, EncodedSample, RefusedResult
from data_prep.engine.ranks import Ranks
from data_prep.media.clips import Entry
from data_prep.planning.plan import PackingPlan
from data_prep.planning.splits import Split, SplitFractions
from data_prep.refusals import PrepError
from data_prep.writing.dataset_folder import LEDGER
from data_prep.writing.ledger import (
    EarlierSamples,
    Ledger,
    LedgerProgress,
    digest_of,
    ledger_name,
    read_progress,
)
from data_prep.writing.tar_shards import ShardSeries
from dit.command_line import Whole, option, size_in_bytes

byte_size = partial(size_in_bytes, example="1GiB, 500MB or 1000000")


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options of the command line for what is written."""

    overwrite: bool = option(False, "--regenerate_cache")
    """Encode everything anew: first remove the dataset in the output folder, but no other files."""
    shard_size: Whole = option(10_000, metavar="SAMPLES")
    """Largest number of samples in a shard. (default: %(default)s)"""
    max_shard_bytes: Annotated[int, byte_size] = option(2**30, metavar="SIZE", default="1GiB")
    """Largest size of a shard, such as 500MB or 1GiB. (default: %(default)s)"""
    license: str | None = option(None, metavar="NAME")
    """Licence of the data, such as CC-BY-4.0, for dataset_card.json. (default: none given)"""


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Options of the command line for how samples are packed."""

    trust_cache: bool = False
    """Continue with the plan of an earlier run, without checking for changed files."""
    max_bad_fraction: float = option(0.05, metavar="FRACTION")
    """Largest fraction of the samples, 0 to 1, that may be refused. (default: %(default)s)"""
    batch_size: Whole = option(1, metavar="SAMPLES")
    """Samples of the same shape to encode together. (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class PackOptions(WorkOptions, ShardOptions):
    """Options of a packing that do not change the content of samples."""

    split: SplitFractions
    split_is_given: bool = True
    """Whether the user gave the split; the default may change for a small dataset."""
    block_size: int = 32
    """Samples that a worker gets at once."""
    decode_threads: int = 0
    verify: bool = False
    """Whether each latent is decoded again and compared with its source."""

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise PrepError(f"--shard_size {self.shard_size} must be at least 1 sample")
        if self.max_shard_bytes < 1:
            raise PrepError(f"--max_shard_bytes {self.max_shard_bytes} must be at least 1 byte")
        if not 0 <= self.max_bad_fraction <= 1:
            raise PrepError(f"--max_bad_fraction {self.max_bad_fraction} must lie in 0 to 1")
        if self.decode_threads < 0:
            raise PrepError(f"--decode_threads {self.decode_threads} must be at least 0")
        if self.batch_size < 1:
            raise PrepError(f"--batch_size {self.batch_size} must be at least 1 sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBlocks:
    """The blocks of a plan that one rank packs."""

    plan: PackingPlan
    size: int
    ranks: Ranks

    @property
    def total(self) -> int:
        """Samples."""
        return sum(len(block) for block in self.after(0))

    def after(self, samples: int) -> Iterator[tuple[bytes, ...]]:
        """The blocks after the first `samples` samples of this rank."""
        blocks = self.plan.blocks(self.size, rank=self.ranks.rank, world=self.ranks.world)
        return (block for number, block in enumerate(blocks) if number * self.size >= samples)


@dataclass(kw_only=True)
class Writer:
    """Writes the shards of each split, and the ledger, of one rank."""

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
        """How much an earlier run has written."""
        return read_progress(self._path, block=share.size, total=share.total)

    @contextmanager
    def resumed(self, progress: LedgerProgress) -> Iterator[None]:
        """Opens shards and ledger to continue after `progress`; cuts off what lies behind."""
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
                # All but the last, which goes on.
                whole = {name: counts[name] for name in sorted(counts)[:-1]}
                series.resume(whole, progress.ends.get(split, [0]))
                self._series[split] = stack.enter_context(series)
            self._ledger = stack.enter_context(closing(Ledger(self._path, keep=progress.size)))
            yield

    def without_earlier(self, block: Sequence[bytes]) -> Block:
        """The block with None for samples that can be copied from an earlier packing."""
        assert self._earlier is not None
        has = self._earlier.has
        return tuple(None if has(line) else line for line in block)

    def write(
        self, block: Sequence[bytes], outcomes: Sequence[EncodedSample | RefusedResult | None]
    ) -> None:
        """Writes the samples of a block into shards, then their lines into the ledger."""
        assert self._ledger is not None
        lines = [self._write(*pair) for pair in zip(block, outcomes, strict=True)]
        # Before the ledger, whose lines say that the bytes are in the shards.
        for series in self._series.values():
            series.flush()
        self._ledger.append(lines)

    def _write(self, line: bytes, outcome: EncodedSample | RefusedResult | None) -> dict[str, Any]:
        """Writes one sample into its split; returns its line of the ledger."""
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
