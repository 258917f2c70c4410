"""The first links that we add to Energon's chain of datasets: from shards to samples.

1. SafeReader    heads of records; a damaged shard becomes one that says so, not the loader's death
2. Cooking       records -> samples; counts refused ones and lets the others pass

groups.py has those that make groups of samples, deliveries.py the last.
"""

from __future__ import annotations

import struct
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon import Sample, WorkerConfig
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.base import BaseWrapperDataset

from dit.batch import LatentSample
from dit.data.cook import SampleSize
from dit.data.rejections import DataError, ReaderCounts, RefusedSample, SampleRefused
from dit.data.tar.file_cache import NotPlain, OpenShards, ShardError
from dit.data.tar.reader import PlainReader, SampleLocation
from dit.data.tar.whole_reader import read_whole

UNREADABLE = "__unreadable__"
"""Part of a record that stands for a sample whose shard cannot be read: the error's text."""

_DAMAGE = (
    *(tarfile.TarError, OSError, EOFError, struct.error),
    # What tarfile and Energon make of garbled headers.
    *(ValueError, LookupError, AttributeError, TypeError, ArithmeticError),
    *(RecursionError, MemoryError),
)
_LOST = (NotPlain, ShardError, OSError, MemoryError)
"""What becomes of a sample between its head and its whole."""
_DETAIL = 500  # characters; what a garbled file says of itself may have no end
# A pass without a single good sample ends the run, within these bounds on the samples of a pass.
_PATIENCE = (1_000, 100_000)


class SafeReader:
    """An Energon shard reader that reports damage as a record, and reads heads where that is plain.

    Energon's own dies of damage: no error handler sees a fault of the tar itself.
    """

    def __init__(self, reader: ShardInfosITarReader, shards: OpenShards):
        self._reader = reader
        self._plain = PlainReader(reader, shards)

    def __len__(self) -> int:
        return len(self._reader)

    def __str__(self) -> str:
        return f"SafeReader({self._reader})"

    def __getitem__(self, index: int) -> Any:
        try:
            try:
                return self._read(index)
            except _DAMAGE:
                self._reopen()  # a passing fault of a network drive deserves a second try
                return self._read(index)
        except _DAMAGE as error:
            self._reopen()
            return self._unreadable(index, error)

    def _read(self, index: int) -> Any:
        try:
            return self._plain[index]
        except NotPlain:
            return read_whole(self._reader, index)

    def _reopen(self) -> None:
        self._plain.close()
        self._reader.close()
        self._reader.cached_offset_reader.tar_index_reader_cache.clear()

    def _unreadable(self, index: int, error: Exception) -> dict[str, Any]:
        firsts = self._reader.shard_count_cumsum
        shard = bisect_right(firsts, index) - 1
        name = self._reader.shard_infos[shard].name
        source = SourceInfo(
            dataset_path=self._reader.base_path, index=index, shard_name=name, file_names=()
        )
        return {
            "__key__": f"(sample {index - firsts[shard]} of the shard)",
            "__shard__": name,
            "__restore_key__": ("Webdataset", index),
            "__sources__": (source,),
            UNREADABLE: _said(error),
        }


def read_parts(place: SampleLocation) -> dict[str, Any]:
    """The record there, or one that says why it cannot be read."""
    try:
        try:
            return place.parts()
        except _LOST:
            place.shards.close()  # as above
            return place.parts()
    except _LOST as error:
        place.shards.close()
        return {UNREADABLE: _said(error)}


def _said(error: BaseException) -> str:
    """What a refusal says of an error: ours speak for themselves."""
    return str(error) if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"


@edataclass
class CookedSample(Sample):
    """A sample on its way through Energon's buffers, or the reason why there is none."""

    origin: SourceInfo
    stored_key: str
    """In the shard; that of the sample has the dataset of a blend before it."""
    load: Callable[[], LatentSample] | None = None
    """Reads and decodes it, for its pack; raises Refused where there is something wrong with it.

    Its tensors may be gone with the next sample that is read.
    """
    measured: SampleSize | None = None
    refusal: SampleRefused | None = None

    @property
    def size(self) -> SampleSize:
        """In a pack; of a sample that was not refused."""
        assert self.measured is not None
        return self.measured

    def refused(self, refusal: SampleRefused) -> RefusedSample:
        """The name and place of the sample, and why it is left out."""
        return RefusedSample(
            key=self.stored_key,
            shard=self.origin.shard_name,
            dataset=str(self.origin.dataset_path),
            reason=refusal.reason.value,  # plain text, because it is part of a saved state
            detail=refusal.detail[:_DETAIL],
        )


class Cooking(BaseWrapperDataset[Any, CookedSample]):
    """Records -> samples that were not refused; counts all of them.

    Energon does this in two links that number the samples, so that what is random can be drawn
    again, and together take as long as the decoding of a small sample. Nothing is random here.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        cook: Callable[[Any], CookedSample],
        counts: ReaderCounts,
        *,
        worker_config: WorkerConfig,
    ):
        super().__init__(dataset, worker_config=worker_config)
        self._cook = cook
        self._counts = counts
        self._refused_in_a_row = 0

    def reset_state_own(self) -> None:
        self._refused_in_a_row = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[CookedSample]:
        for raw in self.dataset:
            sample = self._cook(_record(raw))
            self._counts.accept()
            if sample.refusal is None:
                self._refused_in_a_row = 0
                yield sample
                continue
            self._counts.refuse(sample.refused(sample.refusal))
            self._refused_in_a_row += 1
            check_patience(self._refused_in_a_row, of=self)

    def restore_sample(self, restore_key: Any) -> CookedSample:
        """The sample of a saved buffer, read again and not counted again.

        Raises:
            DataError: it was usable when the state was saved and is not now.
        """
        sample = self._cook(_record(self.dataset.restore_sample(restore_key)))
        if sample.refusal is not None:
            place = sample.refused(sample.refusal).place
            raise DataError(
                f"{place}: a sample of the saved loader state cannot be used any more"
                f" ({sample.refusal.reason}: {sample.refusal.detail}); restore the shard to resume"
            )
        return sample

    def config(self) -> dict[str, Any]:
        return self.dataset.config()


def _record(raw: Any) -> Any:
    """Of a shard, or of mock data."""
    return raw.data[0] if isinstance(raw, RawSampleData) else raw


def check_patience(refused_in_a_row: int, *, of: SavableDataset) -> None:
    """Raises DataError when a pass had no good sample."""
    least, most = _PATIENCE
    if refused_in_a_row >= (patience := min(max(of.len_worker(), least), most)):
        raise DataError(f"no usable sample among the last {patience} that were read")
