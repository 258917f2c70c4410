"""The first links that we add to Energon's chain of datasets: from shards to samples.

1. SafeReader    heads of records; a damaged shard becomes one that says so, not the loader's death
2. Cooking       records -> samples; counts refused ones and lets the others pass

groups.py has those that make groups of samples, deliveries.py the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.energon import Sample, WorkerConfig
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.source_info import SourceInfo
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.buffer import SavableSampleBuffer
from megatron.energon.wrappers.packing_dataset import PackingDataset

from dit.batch import LatentSample, PackedBatch
from dit.data.cook import SampleSize
from dit.data.energon.worker_shards import SampleId
from dit.data.pack import best_fit_decreasing, full_with_first, turn
from dit.data.rejections import DataError, ReaderCounts, RefusedSample, RejectCounts, SampleRefused
from dit.pack_wire import BufferSlot, PackBuffers, pin_pack

_DETAIL = 500  # characters; what a garbled file says of itself may have no end
# A pass without a single good sample ends the run, within these bounds on the samples of a pass.
_PATIENCE = (1_000, 100_000)


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


@edataclass
class SampleGroup(Sample):
    """Samples that share a pack."""

    samples: tuple[CookedSample, ...]
    cost: float
    """Of the pack in training, in any unit."""


class OldestFirst(PackingDataset):
    """Energon's packing, one group at a time; all that does not go along waits for newcomers.

    Energon has no such hook in 7.4: its reading buffer, which is empty while a group is selected
    and is saved with the state, takes back what waits.
    """

    def __init__(self, dataset: SavableDataset[CookedSample], *, capacity: int, **kwargs: Any):
        self._capacity = capacity
        super().__init__(dataset, pre_packer=self._select, final_packer_stateless=True, **kwargs)

    def _select(self, samples: list[CookedSample]) -> list[list[CookedSample]]:
        lengths = [sample.size.tokens for sample in samples]
        if len(samples) < self.buffer_size:  # the stream has ended
            bins = best_fit_decreasing(lengths, capacity=self._capacity)
            return [[samples[index] for index in members] for members in bins]
        chosen = full_with_first(lengths, capacity=self._capacity)
        left = samples.copy()
        group = [left.pop(index) for index in reversed(chosen)]
        self._reading_buffer.extend(left)
        return [group[::-1]]

    def _fill_reading_buffer(self, source_iter: Iterator, log_progress: bool = False) -> bool:
        del log_progress  # every worker would draw a bar of its own
        return super()._fill_reading_buffer(source_iter, log_progress=False)


class FlopsBalancedOrder(BaseWrapperDataset[SampleGroup, SampleGroup]):
    """Hands on the groups in an order in which those of all ranks cost alike at each turn."""

    _savable_fields = ("_waiting", "_turns")

    def __init__(
        self,
        dataset: SavableDataset[SampleGroup],
        *,
        packs: int,
        seed: int,
        worker_config: WorkerConfig,
    ):
        super().__init__(dataset, worker_config=worker_config)
        self._packs = packs
        self._seed = seed
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._waiting = SavableSampleBuffer(self.dataset, worker_config=self.worker_config)
        self._turns = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[SampleGroup]:
        self._waiting.worker_start()
        groups, waiting = iter(self.dataset), self._waiting
        while True:
            now = turn(self._turns, packs=self._packs, seed=self._seed)
            while len(waiting.buffer) < now.waiting and (group := next(groups, None)) is not None:
                waiting.append(group)
            if not waiting.buffer:
                return
            by_cost = sorted(range(len(waiting.buffer)), key=lambda i: waiting.buffer[i].cost)
            self._turns += 1
            yield waiting.pop(by_cost[min(now.place, len(by_cost) - 1)])

    def config(self) -> dict[str, Any]:
        return self.dataset.config()


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
        return replace(self, pack=pin_pack(self.pack))


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
