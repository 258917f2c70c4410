"""The last link of a reader: packs on their way to the main process, with counts and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from dit.batch import PackedBatch
from dit.data.energon.readers import check_patience
from dit.data.energon.worker_shards import SampleId
from dit.data.rejections import DataError, ReaderCounts, RefusedSample, RejectCounts
from dit.data.shared_memory import BufferSlot, PackBuffers


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPack:
    """A pack and what it is made of."""

    pack: PackedBatch | None
    """None if all its samples were refused."""
    samples: tuple[SampleId, ...]
    """Those in the pack. Others are read again by a run that goes on elsewhere, and refused."""
    refused: tuple[tuple[RefusedSample, SampleId], ...] = ()
    """Samples that were found unusable when they were read for the pack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerBatch:
    """What one reader hands to the main process."""

    worker: int
    """Reader of this rank, from 0."""
    tally: RejectCounts
    """Its counts when the pack was made."""
    pack: PackedBatch | None = None
    """None at the end of a finite stream, and with an error."""
    place: BufferSlot | None = None
    """Of its numbers, where they lie in a row that the processes share."""
    samples: tuple[SampleId, ...] = ()
    refused: tuple[RefusedSample, ...] = ()
    """Those that the reader has refused since its last delivery."""
    follows_snapshot: bool = False
    """The reader was saved just before it made this pack."""
    error: str = ""

    def pin_memory(self) -> WorkerBatch:
        """Called by the DataLoader where there is a GPU, so that copies to it overlap."""
        if self.pack is None or self.place is not None:
            return self
        outline, row = self.pack.joined()
        return replace(self, pack=outline.filled(row.pin_memory()))


class WorkerOutput(BaseWrapperDataset[FinishedPack, WorkerBatch]):
    """Last link in a reader. Errors travel as values: torch would bury them in a traceback."""

    _savable_fields = ("tally",)

    def __init__(
        self,
        dataset: SavableDataset[FinishedPack],
        counts: ReaderCounts,
        rows: PackBuffers,
        *,
        worker_config: WorkerConfig,
    ):
        super().__init__(dataset, worker_config=worker_config)
        self.tally = counts.tally
        self._counts = counts
        self._rows = rows
        self._skipped: Mapping[int, int] = {}
        self._saved = False
        self._refused_in_a_row: Counter[int] = Counter()  # of each dataset

    def reset_state_own(self) -> None:
        self.tally.restore_state(RejectCounts().save_state())
        self._refused_in_a_row.clear()

    def skips(self, packs: Mapping[int, int]) -> None:
        """So many packs each worker makes and does not send, as Energon resumes from a snapshot."""
        self._skipped = packs

    def save_state(self) -> FlexState:
        self._saved = True
        return super().save_state()

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[WorkerBatch]:
        worker = self.worker_config.rank_worker_id()
        skipped = self._skipped.get(worker, 0)
        try:
            for packed in self.dataset:
                self._count(packed)
                if packed.pack is None:
                    continue
                saved, self._saved = self._saved, False
                pack, place = packed.pack, None
                if skipped:
                    skipped -= 1  # a place would stay taken, as nobody receives the pack
                else:
                    pack, place = self._rows.placed(pack)
                yield WorkerBatch(
                    worker=worker,
                    tally=self.tally.snapshot(),
                    pack=pack,
                    place=place,
                    samples=packed.samples,
                    refused=self._counts.take_fresh(),
                    follows_snapshot=saved,
                )
            yield self._last(worker)
        except DataError as error:
            yield replace(self._last(worker), error=str(error))

    def _last(self, worker: int) -> WorkerBatch:
        tally, refused = self.tally.snapshot(), self._counts.take_fresh()
        return WorkerBatch(worker=worker, tally=tally, refused=refused)

    def received(self, delivery: WorkerBatch) -> WorkerBatch:
        """In the main process: with all the numbers of its pack."""
        if delivery.pack is None or delivery.place is None:
            return delivery
        pack = self._rows.received(delivery.pack, delivery.place)
        return replace(delivery, pack=pack, place=None)

    def _count(self, packed: FinishedPack) -> None:
        """Counts what was refused after it had been chosen."""
        for sample, (dataset, _) in packed.refused:
            self._counts.refuse(sample)
            self._refused_in_a_row[dataset] += 1
            check_patience(self._refused_in_a_row[dataset], of=self)
        for dataset, _ in packed.samples:
            self._refused_in_a_row[dataset] = 0

    def config(self) -> dict[str, Any]:
        return self.dataset.config()
