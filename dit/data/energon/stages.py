"""This project's stages in Energon's chain of datasets, each of which reads from the one before.

1. Cooking               decodes records to samples; counts refused ones and passes on the others
   (Energon's repeat, blend and shuffle)
2. OldestFirst           takes full groups from a buffer of samples, each with the oldest sample;
                         groups of similar cost with dataset.balance=flops_target
3. FlopsBalancedOrder    (dataset.balance=flops) chooses the next one of several groups
   FlopsTargetOrder      (dataset.balance=flops_target) chooses by an estimate over more groups
   (Energon's map makes a pack of each group)
4. WorkerOutput          batches for the main process: packs with counts and errors
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.energon import Sample, WorkerConfig
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.source_info import SourceInfo
from megatron.energon.state import FlexState
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from dit.batch import LatentSample, PackedBatch
from dit.bin_packing import (
    RECENT,
    Turn,
    best_fit_decreasing,
    full_at_like_cost,
    full_with_first,
    nearest_in_cost,
    turn,
)
from dit.data.energon.internals import OpenPacking
from dit.data.energon.worker_shards import SampleId, ThinWrapper
from dit.data.pack import SampleSize
from dit.data.rejections import DataError, ReaderCounts, RefusedSample, RejectCounts, SampleRefused
from dit.pack_wire import BufferSlot, PackBuffers, pin_pack

_DETAIL = 500  # characters of a refusal's detail; a garbled file may cause an endless one
# A pass without a single good sample ends the run, within these bounds on the samples of a pass.
_PATIENCE = (1_000, 100_000)


@edataclass
class CookedSample(Sample):
    """A sample in Energon's buffers, or why it was refused."""

    origin: SourceInfo
    stored_key: str
    """Key in the shard. In a blend, the sample's own key is this one after a prefix of its
    dataset."""
    load: Callable[[], LatentSample] | None = None
    """Function that reads and decodes the sample for its pack, or raises SampleRefused. The tensors
    may be overwritten when the next sample is read."""
    measured: SampleSize | None = None
    cost: float = 0.0
    """Relative cost of training on the sample, by which samples are grouped into packs."""
    refusal: SampleRefused | None = None

    @property
    def size(self) -> SampleSize:
        """Size of the sample in a pack; only a sample that was not refused has one."""
        assert self.measured is not None
        return self.measured

    @property
    def place(self) -> str:
        """Shard and key of the sample, for messages."""
        return f"{self.origin.dataset_path}/{self.origin.shard_name}, key {self.stored_key}"

    def refused(self, refusal: SampleRefused) -> RefusedSample:
        """The record of a refusal of this sample, with its key and shard."""
        return RefusedSample(
            key=self.stored_key,
            shard=self.origin.shard_name,
            dataset=str(self.origin.dataset_path),
            reason=refusal.reason.value,  # plain text, because it is part of a saved state
            detail=refusal.detail[:_DETAIL],
        )


class Cooking(ThinWrapper):
    """Stage that decodes and counts records, and passes on those that were not refused.

    It replaces two stages of Energon, which number the samples so that random draws can be
    repeated. These take as long as decoding a small sample, and nothing in cooking is random.
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

    def __iter__(self) -> Iterator[CookedSample]:
        for raw in self.dataset:
            sample = self._cook(_record(raw))
            self._counts.accept(sample.measured.unknown if sample.measured else ())
            if sample.refusal is None:
                self._refused_in_a_row = 0
                yield sample
                continue
            self._counts.refuse(sample.refused(sample.refusal))
            self._refused_in_a_row += 1
            check_patience(self._refused_in_a_row, of=self)

    def restore_sample(self, restore_key: Any) -> CookedSample:
        """Reads a sample of a saved buffer or of a validation pack again, without counting it.

        Raises:
            DataError: the sample could be used before, and is refused now.
        """
        sample = self._cook(_record(self.dataset.restore_sample(restore_key)))
        if sample.refusal is not None:
            raise DataError(
                f"{sample.place}: this sample could be used before, but not now"
                f" ({sample.refusal.reason}: {sample.refusal.detail}); restore the shard"
            )
        return sample


def _record(raw: Any) -> Any:
    """The record: what is inside the RawSampleData of a shard; mock data are records already."""
    return raw.data[0] if isinstance(raw, RawSampleData) else raw


def check_patience(refused_in_a_row: int, *, of: SavableDataset) -> None:
    """Raises DataError if as many samples were refused in a row as a reader's pass over `of` has.

    The limit is at least 1,000 and at most 100,000 samples.
    """
    least, most = _PATIENCE
    if refused_in_a_row >= (patience := min(max(of.len_worker(), least), most)):
        raise DataError(
            f"no usable sample among the last {patience} that were read; do what the lines below"
            " say, or read other data (dataset.path)"
        )


@edataclass
class SampleGroup(Sample):
    """Samples that share a pack, in Energon's chain."""

    samples: tuple[CookedSample, ...]
    cost: float
    """Relative cost of training on the pack; 0 with `dataset.balance=none`."""


class OldestFirst(OpenPacking):
    """Stage that packs samples one group at a time, each with the oldest sample in the buffer.

    The order is that of `full_packs` in dit/bin_packing.py. At the end of a finite stream,
    `best_fit_decreasing` packs the remaining samples. Energon 7.4 has no hook for this order, so
    samples that are not chosen return to its reading buffer, which is saved with the state.
    """

    def __init__(
        self,
        dataset: SavableDataset[CookedSample],
        *,
        capacity: int,
        at_like_cost: bool = False,
        **kwargs: Any,
    ):
        self._at_like_cost = at_like_cost
        super().__init__(
            dataset,
            capacity=capacity,
            pre_packer=self._select,
            final_packer_stateless=True,
            **kwargs,
        )

    def length_of(self, sample: CookedSample) -> int:
        return sample.size.tokens

    def _select(self, samples: list[CookedSample]) -> list[list[CookedSample]]:
        lengths = [self.length_of(sample) for sample in samples]
        if len(samples) < self.buffer_size:  # the stream has ended
            bins = best_fit_decreasing(lengths, capacity=self._capacity)
            return [[samples[index] for index in members] for members in bins]
        if self._at_like_cost:
            costs = [sample.cost for sample in samples]
            chosen = full_at_like_cost(lengths, costs, capacity=self._capacity)
        else:
            chosen = full_with_first(lengths, capacity=self._capacity)
        left = samples.copy()
        # From the last on, so that the indices of those that are still to be taken stay right.
        group = [left.pop(index) for index in reversed(chosen)]
        self.put_back(left)
        return [group[::-1]]


class FlopsBalancedOrder(ThinWrapper):
    """Stage that orders groups so that at each turn the groups of all ranks cost about the same."""

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

    def __iter__(self) -> Iterator[SampleGroup]:
        self._waiting.worker_start()
        groups, waiting = iter(self.dataset), self._waiting
        while True:
            now = turn(self._turns, packs=self._packs, seed=self._seed)
            while len(waiting.buffer) < now.waiting and (group := next(groups, None)) is not None:
                waiting.append(group)
                self._arrived(group.cost)
            if not waiting.buffer:
                return
            self._turns += 1
            yield waiting.pop(self._next([group.cost for group in waiting.buffer], now))

    def _arrived(self, cost: float) -> None:
        """Records the `cost` of a group that joined the waiting ones; by default does nothing."""

    def _next(self, costs: Sequence[float], now: Turn) -> int:
        """Index, in `costs`, of the waiting group to return at the turn `now`."""
        by_cost = sorted(range(len(costs)), key=costs.__getitem__)
        return by_cost[min(now.place, len(by_cost) - 1)]


class FlopsTargetOrder(FlopsBalancedOrder):
    """Stage that takes, at each turn, the group whose cost is nearest to a target.

    The target is about equal on all ranks (see `nearest_in_cost`).
    """

    _savable_fields = (*FlopsBalancedOrder._savable_fields, "_recent")

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._recent: list[float] = []  # costs of the latest groups, in the order of arrival

    def _arrived(self, cost: float) -> None:
        self._recent.append(cost)
        del self._recent[: -RECENT * self._packs]

    def _next(self, costs: Sequence[float], now: Turn) -> int:
        quantile = (now.place + 0.5) / now.waiting
        return nearest_in_cost(costs, self._recent, quantile=quantile)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPack:
    """A pack and the samples that it was made of."""

    pack: PackedBatch | None
    """The pack; None if all its samples were refused."""
    samples: tuple[SampleId, ...]
    """Ids of the samples in the pack; a run that resumes with another layout reads them again."""
    refused: tuple[tuple[RefusedSample, SampleId], ...] = ()
    """Samples that were refused only when they were read for the pack, with their ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerBatch:
    """What a worker sends to the main process: a pack with counts, or an error."""

    worker: int
    """Index of the worker on this rank."""
    counts: RejectCounts
    """Counts of the worker up to this pack."""
    pack: PackedBatch | None = None
    """The pack; None at the end of a finite stream, or with an error."""
    slot: BufferSlot | None = None
    """Location of the pack's numbers in shared memory; None if the message has them."""
    samples: tuple[SampleId, ...] = ()
    refused: tuple[RefusedSample, ...] = ()
    """Samples that the worker has refused since its last message."""
    follows_snapshot: bool = False
    """Whether the worker's state was saved just before this pack."""
    error: str = ""

    def pin_memory(self) -> WorkerBatch:
        """The batch with its pack in page-locked memory, from which copies to a GPU can overlap.

        A batch without a pack, or whose pack is in shared memory, is returned unchanged. torch's
        DataLoader calls this method.
        """
        if self.pack is None or self.slot is not None:
            return self
        return replace(self, pack=pin_pack(self.pack))


class WorkerOutput(ThinWrapper):
    """Last stage of a worker, which sends packs to the main process.

    Errors are sent as values, because torch would hide them in a traceback.
    """

    _savable_fields = ("tally",)  # the name of the counts in saved states

    def __init__(
        self,
        dataset: SavableDataset[FinishedPack],
        counts: ReaderCounts,
        buffers: PackBuffers,
        *,
        worker_config: WorkerConfig,
    ):
        super().__init__(dataset, worker_config=worker_config)
        self.tally = counts.counts
        self._counts = counts
        self._buffers = buffers
        self._skipped: Mapping[int, int] = {}
        self._saved = False
        self._refused_in_a_row: Counter[int] = Counter()  # by dataset

    def reset_state_own(self) -> None:
        self.tally.restore_state(RejectCounts().save_state())
        self._refused_in_a_row.clear()

    def skips(self, packs: Mapping[int, int]) -> None:
        """Sets `packs`: worker -> number of packs that it makes again after a resume.

        The main process had these packs before the resume and drops them, so `__iter__` takes no
        room in shared memory for them.
        """
        self._skipped = packs

    def save_state(self) -> FlexState:
        self._saved = True
        return super().save_state()

    def __iter__(self) -> Iterator[WorkerBatch]:
        worker = self.worker_config.rank_worker_id()
        skipped = self._skipped.get(worker, 0)
        try:
            for finished in self.dataset:
                self._count(finished)
                if finished.pack is None:
                    continue
                saved, self._saved = self._saved, False
                pack, slot = finished.pack, None
                if skipped:
                    skipped -= 1  # its slot would stay taken, because nobody receives the pack
                else:
                    pack, slot = self._buffers.placed(pack)
                yield WorkerBatch(
                    worker=worker,
                    counts=self.tally.copied(),
                    pack=pack,
                    slot=slot,
                    samples=finished.samples,
                    refused=self._counts.take_fresh(),
                    follows_snapshot=saved,
                )
            yield self._last(worker)
        except DataError as error:
            yield replace(self._last(worker), error=str(error))

    def _last(self, worker: int) -> WorkerBatch:
        counts, refused = self.tally.copied(), self._counts.take_fresh()
        return WorkerBatch(worker=worker, counts=counts, refused=refused)

    def received(self, batch: WorkerBatch) -> WorkerBatch:
        """The batch, in the main process, with the numbers of its pack from shared memory."""
        if batch.pack is None or batch.slot is None:
            return batch
        return replace(batch, pack=self._buffers.received(batch.pack, batch.slot), slot=None)

    def _count(self, finished: FinishedPack) -> None:
        """Counts the samples that were refused only when they were read for a pack.

        Raises:
            DataError: too many samples of a dataset were refused in a row.
        """
        for sample, (dataset, _) in finished.refused:
            self._counts.refuse(sample)
            self._refused_in_a_row[dataset] += 1
            check_patience(self._refused_in_a_row[dataset], of=self)
        for dataset, _ in finished.samples:
            self._refused_in_a_row[dataset] = 0
