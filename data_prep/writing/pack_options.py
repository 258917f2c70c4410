"""Options of `data_prep` that do not change the samples; this file does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from data_prep.planning.splits import SplitFractions
from data_prep.refusals import PrepError
from dit.command_line import Whole, option, size_in_bytes

byte_size = partial(size_in_bytes, example="1GiB, 500MB or 1000000")


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Command-line options for the shards that are written."""

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
    """Command-line options for how samples are packed."""

    trust_cache: bool = False
    """Continue with the plan of an earlier run, without checking for changed files."""
    max_bad_fraction: float = option(0.05, metavar="FRACTION")
    """Largest fraction of the samples, 0 to 1, that may be refused. (default: %(default)s)"""
    batch_size: Whole = option(1, metavar="SAMPLES")
    """Samples of the same shape to encode together. (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class PackOptions(WorkOptions, ShardOptions):
    """All options of a run that do not change the content of the samples."""

    split: SplitFractions
    split_is_given: bool = True
    """Whether the user gave the split; the default may be changed for a small dataset."""
    block_size: int = 32
    """Number of samples that a worker gets at a time."""
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
