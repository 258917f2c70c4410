"""The links that we add to Energon's chain of datasets.

1. SafeReader    a damaged shard becomes a record that says so, instead of the loader's death
2. Sift          counts refused samples and lets the others pass
3. Deliveries    hands packs to the main process, with counts and errors

groups.py has those that make groups of samples, between the second and the third.
"""

from __future__ import annotations

import struct
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.energon import Sample, WorkerConfig
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.source_info import SourceInfo
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset
from torch import Tensor

from dit.batch import LatentSample, PackedBatch
from dit.data.rejects import DataError, Refused, Tally
from dit.data.shares import SampleId

UNREADABLE = "__unreadable__"
"""Part of a record that stands for a sample whose shard cannot be read: the error's text."""

_DAMAGE = (
    *(tarfile.TarError, OSError, EOFError, struct.error),
    *(ValueError, LookupError, AttributeError),  # what tarfile and Energon make of garbled headers
)
# A pass without a single good sample ends the run, within these bounds on the samples of a pass.
_PATIENCE = (1_000, 100_000)


class SafeReader:
    """An Energon shard reader that reports damage as a record.

    Energon's own dies of it: no error handler sees a fault of the tar itself.
    """

    def __init__(self, reader: ShardInfosITarReader):
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader)

    def __str__(self) -> str:
        return f"SafeReader({self._reader})"

    def __getitem__(self, index: int) -> Any:
        try:
            try:
                return self._reader[index]
            except _DAMAGE:
                self._reopen()  # a passing fault of a network drive deserves a second try
                return self._reader[index]
        except _DAMAGE as error:
            self._reopen()
            return self._unreadable(index, error)

    def _reopen(self) -> None:
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
            UNREADABLE: f"{type(error).__name__}: {error}",
        }


@edataclass
class CookedSample(Sample):
    """A LatentSample on its way through Energon's buffers, or the reason why there is none."""

    place: str
    """Shard and key, for messages."""
    latent: LatentSample | None = None
    tokens: int = 0
    """Tokens in a pack, padding included."""
    shape: tuple[int, int] | None = None
    """Tokens without padding, and those of the caption."""
    refusal: Refused | None = None


class Sift(BaseWrapperDataset[CookedSample, CookedSample]):
    """Counts every sample in `tally` and passes on those that were not refused."""

    def __init__(
        self, dataset: SavableDataset[CookedSample], tally: Tally, *, worker_config: WorkerConfig
    ):
        super().__init__(dataset, worker_config=worker_config)
        self._tally = tally
        self._refused_in_a_row = 0

    def reset_state_own(self) -> None:
        self._refused_in_a_row = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[CookedSample]:
        least, most = _PATIENCE
        patience = min(max(self.len_worker(), least), most)
        for sample in self.dataset:
            if sample.refusal is None:
                self._tally.accept()
                self._refused_in_a_row = 0
                yield sample
                continue
            self._tally.refuse(sample.refusal, place=sample.place)
            self._refused_in_a_row += 1
            if self._refused_in_a_row >= patience:
                raise DataError(f"no usable sample among the last {patience} that were read")

    def restore_sample(self, restore_key: Any) -> CookedSample:
        """The sample of a saved buffer, read again and not counted again.

        Raises:
            DataError: it was usable when the state was saved and is not now.
        """
        sample = self.dataset.restore_sample(restore_key)
        if sample.refusal is not None:
            raise DataError(
                f"{sample.place}: a sample of the saved loader state cannot be used any more"
                f" ({sample.refusal.reason}: {sample.refusal.detail}); restore the shard to resume"
            )
        return sample

    def config(self) -> dict[str, Any]:
        return self.dataset.config()


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A pack and what it is made of."""

    pack: PackedBatch
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """What one reader hands to the main process."""

    worker: int
    """Reader of this rank, from 0."""
    tally: Tally
    """Its counts when the pack was made."""
    pack: PackedBatch | None = None
    """None at the end of a finite stream, and with an error."""
    samples: tuple[SampleId, ...] = ()
    follows_snapshot: bool = False
    """The reader was saved just before it made this pack."""
    error: str = ""

    def pin_memory(self) -> Delivery:
        """Called by the DataLoader where there is a GPU, so that copies to it overlap."""
        if self.pack is None:
            return self
        pinned = {
            f.name: value.pin_memory()
            for f in fields(self.pack)
            if isinstance(value := getattr(self.pack, f.name), Tensor)
        }
        return replace(self, pack=replace(self.pack, **pinned))


class Deliveries(BaseWrapperDataset[Packed, Delivery]):
    """Last link in a reader. Errors travel as values: torch would bury them in a traceback."""

    _savable_fields = ("tally",)

    def __init__(
        self, dataset: SavableDataset[Packed], tally: Tally, *, worker_config: WorkerConfig
    ):
        super().__init__(dataset, worker_config=worker_config)
        self.tally = tally
        self._saved = False

    def reset_state_own(self) -> None:
        self.tally.restore_state(Tally().save_state())

    def save_state(self) -> FlexState:
        self._saved = True
        return super().save_state()

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[Delivery]:
        worker = self.worker_config.rank_worker_id()
        try:
            for packed in self.dataset:
                saved, self._saved = self._saved, False
                yield Delivery(
                    worker=worker,
                    tally=self.tally.snapshot(),
                    pack=packed.pack,
                    samples=packed.samples,
                    follows_snapshot=saved,
                )
            yield Delivery(worker=worker, tally=self.tally.snapshot())
        except DataError as error:
            yield Delivery(worker=worker, tally=self.tally.snapshot(), error=str(error))

    def config(self) -> dict[str, Any]:
        return self.dataset.config()
