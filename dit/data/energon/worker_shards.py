"""Which samples a reader reads: its share of each dataset, and what other readers left of a pass.

A reader is a loader process, or a rank that has none. Packs come from all readers in turn, so the
packs of a run are one sequence that only the number of readers decides: of N readers, reader q
gives packs q, q + N, q + 2N, ...; and of R ranks, rank r trains packs r, r + R, r + 2R, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

SampleId = tuple[int, int]
"""Dataset, in the order of the blend, and index of a sample in it."""
Run = tuple[int, int]
"""Samples start ... stop - 1 of a dataset."""

# As many runs are read side by side as Energon opens shards.
_SIDE_BY_SIDE = 16


class ReaderConfig(WorkerConfig):
    """Numbers the readers of all ranks in the order in which their packs come.

    Energon goes through the workers of one rank after those of another. Then global batches depend
    on the ranks wherever train.global_batch_size is not a multiple of the number of readers.
    """

    @property
    def readers(self) -> int:
        """Of all ranks together."""
        return self.world_size * max(1, self.num_workers)

    def reader(self, worker: int) -> int:
        """Number of one of this rank's readers."""
        return worker * self.world_size + self.rank

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        local = override_local_worker_id
        return self.reader(self.rank_worker_id() if local is None else local)


def sample_id(restore_key: Sequence[Any]) -> SampleId:
    """Which sample Energon's key of a cooked sample means."""
    blend = "BlendDataset"
    dataset = restore_key[restore_key.index(blend) + 1] if blend in restore_key else 0
    return dataset, restore_key[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remaining:
    """What a reader reads of a dataset before its own share: left there by other readers."""

    runs: tuple[Run, ...] = ()
    first: int = 0
    """Mock data: from here on they go by the readers of now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCounts:
    """How often all readers together have read the samples of a dataset."""

    begin: int
    """Index of the first sample."""
    times: np.ndarray
    cuts: np.ndarray
    """Where a run is cut, so that no long one stays together: bool."""
    behind: int = 0
    """Readers that are several passes behind the foremost, and counted as one behind."""


class WorkerShard(BaseWrapperDataset[Any, Any], ABC):
    """Link at the bottom of a chain, over what reads one dataset."""

    _savable_fields = ("_left",)

    def __init__(self, dataset: SavableDataset, *, worker_config: ReaderConfig):
        super().__init__(dataset, worker_config=worker_config)
        self._inherited: Mapping[int, Remaining] = {}
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._left: list[Run] | None = None  # the last one is next; None before the start

    def inherit(self, left: Mapping[int, Remaining]) -> None:
        """Sets what each worker reads first; called before they start."""
        self._inherited = left

    def save_state(self) -> FlexState:
        self._start()
        return super().save_state()

    def __iter__(self) -> Iterator[Any]:
        self._start()
        while self._left:
            start, stop = self._left.pop()
            if start + 1 < stop:
                self._left.insert(1 - _SIDE_BY_SIDE, (start + 1, stop))
            sample = self.read(start)
            if sample is not None:
                yield sample
        yield from self.dataset

    def _start(self) -> None:
        if self._left is None:
            left = self._inherited.get(self.worker_config.rank_worker_id(), Remaining())
            self._left = list(reversed(left.runs))
            self.start_at(left.first)

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return self.dataset.config()

    @property
    def has_passes(self) -> bool:
        """False where Energon mixes several passes into one, or has none."""
        return True

    @abstractmethod
    def read(self, index: int) -> Any:
        """Sample `index`, None where the split excludes it."""

    @abstractmethod
    def start_at(self, first: int) -> None:
        """The reader's own share begins at `first`, where it has no end."""

    @abstractmethod
    def reads(self, states: Sequence[FlexState | Remaining]) -> ReadCounts:
        """What readers 0, 1, ... have read, from what was saved of them."""


class FolderShard(WorkerShard):
    """Of the shards of a folder."""

    def __init__(
        self,
        loader: WebdatasetSampleLoaderDataset,
        *,
        factory: BaseWebdatasetFactory,
        before: int,
        worker_config: ReaderConfig,
    ):
        """`before` samples are in the datasets of the blend that come before this one."""
        super().__init__(loader, worker_config=worker_config)
        self._factory = factory
        self._before = before
        workers = range(max(1, worker_config.num_workers))
        loader.workers_slice_offsets = [
            self.slices(worker_config.reader(worker), worker_config.readers) for worker in workers
        ]

    @property
    def has_passes(self) -> bool:
        return self._factory.shuffle_over_epochs == 1

    def slices(self, reader: int, readers: int) -> Sequence[int]:
        """Bounds of the slices that one of `readers` reads in a pass, ascending."""
        alone = WorkerConfig(rank=reader, world_size=readers, num_workers=1)
        return self._factory.shard_workers(
            self._factory.shards,
            alone,
            max_samples_per_sequence=self._factory.max_samples_per_sequence,
            subset=self._factory.subset,
            rotation_offset=self._before % readers,
        )[0]

    def read(self, index: int) -> Any:
        sample = self.dataset.restore_sample(("Webdataset", index))
        return None if sample.data[0] is None else sample

    def start_at(self, first: int) -> None:
        """A pass begins where it always does."""

    def reads(self, states: Sequence[FlexState | Remaining]) -> ReadCounts:
        """Readers that are several passes behind count as one behind the foremost.

        Their samples are longer, and so are read less often. To catch up with all passes would be
        to train on long samples alone.
        """
        passes = [0 if isinstance(state, Remaining) else state["_epoch_count"] for state in states]
        shares = [self.slices(reader, len(states)) for reader in range(len(states))]
        begin, end, least = shares[0][0], shares[-1][-1], max(passes) - 1
        times = np.zeros(end - begin, np.int32)
        cuts = np.zeros(end - begin, bool)
        for slices, state, done in zip(shares, states, passes, strict=True):
            times[slices[0] - begin : slices[-1] - begin] = max(done, least) + 1
            cuts[np.array(slices[:-1]) - begin] = True
            for start, stop in _unread(slices, state):
                times[start - begin : stop - begin] -= 1
        behind = sum(done < least for done in passes)
        return ReadCounts(begin=begin, times=times, cuts=cuts, behind=behind)


def _unread(slices: Sequence[int], state: FlexState | Remaining) -> list[Run]:
    """What a reader has not read of its current pass."""
    runs = list(pairwise(slices))
    if isinstance(state, Remaining) or state["_pending_slices_offset"] is None:
        return runs
    active = [one for one in state["_active_slice_state"] if one is not None]
    pending = state["_pending_slice_indexes"] or ()
    return [(one.current, slices[one.index + 1]) for one in active] + [runs[i] for i in pending]
