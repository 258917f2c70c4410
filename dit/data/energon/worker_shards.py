"""Which samples a reader reads: its shard of each dataset, and what other readers have left.

A reader is a loader worker, or a rank without workers. Packs come from all readers in turn, so
their sequence depends only on the number of readers: reader q of N gives packs q, q + N, q + 2N,
..., and rank r of R trains packs r, r + R, r + 2R, ...
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

from dit.data.energon.internals import IndexRange, passes_read, set_slices, unread
from dit.data.rejections import DataError

SampleId = tuple[int, int]
"""(index of the dataset in the blend, index of the sample in it)."""

# Ranges of samples that are read side by side; Energon opens as many shards.
_SIDE_BY_SIDE = 16


class ReaderConfig(WorkerConfig):
    """Energon's configuration of workers, which numbers readers in the order of their packs.

    Energon itself numbers all workers of one rank before those of the next. With such numbers,
    global batches would depend on the number of ranks, unless train.global_batch_size were a
    multiple of the number of readers.
    """

    @property
    def readers(self) -> int:
        """Number of readers of all ranks together."""
        return self.world_size * max(1, self.num_workers)

    def reader(self, worker: int) -> int:
        """Index, among all readers, of this rank's reader `worker`."""
        return worker * self.world_size + self.rank

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        local = override_local_worker_id
        return self.reader(self.rank_worker_id() if local is None else local)


def sample_id(restore_key: Sequence[Any]) -> SampleId:
    """The id of the sample with the `restore_key` of Energon."""
    blend = "BlendDataset"
    dataset = restore_key[restore_key.index(blend) + 1] if blend in restore_key else 0
    return dataset, restore_key[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remaining:
    """Samples left by former readers, which a reader reads before its own after resharding."""

    runs: tuple[IndexRange, ...] = ()
    first: int = 0
    """For mock data: index from which the new readers divide the samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCounts:
    """How often each sample of a dataset was read, by all readers together."""

    begin: int
    """Index of the first counted sample."""
    times: np.ndarray
    cuts: np.ndarray
    """Boolean mask: ranges of samples are cut before these samples, so that no range is long."""
    behind: int = 0
    """Number of readers that are two or more passes behind the foremost one; they count as one pass
    behind."""


class ThinWrapper(BaseWrapperDataset[Any, Any]):
    """A stage that has the length and settings of the dataset that it reads from."""

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return self.dataset.config()


class WorkerShard(ThinWrapper, ABC):
    """The bottom stage of a chain, which reads the samples of one reader."""

    _savable_fields = ("_left",)

    def __init__(self, dataset: SavableDataset, *, worker_config: ReaderConfig):
        super().__init__(dataset, worker_config=worker_config)
        self._inherited: Mapping[int, Remaining] = {}
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._left: list[IndexRange] | None = None  # the last one is next; None before the start

    def inherit(self, left: Mapping[int, Remaining]) -> None:
        """Sets what each worker reads before its own samples; called before workers start."""
        self._inherited = left

    def save_state(self) -> FlexState:
        self._start()
        return super().save_state()

    def __iter__(self) -> Iterator[Any]:
        self._start()
        while self._left:
            start, stop = self._left.pop()
            if start + 1 < stop:
                # Behind the others that are read side by side: each gives a sample in turn.
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

    @property
    def has_passes(self) -> bool:
        """Whether the dataset is read in passes; False if Energon mixes the passes or has none."""
        return True

    @abstractmethod
    def read(self, index: int) -> Any:
        """Sample number `index` of the dataset; None if the split excludes it."""

    @abstractmethod
    def start_at(self, first: int) -> None:
        """Makes the reader's own samples begin at `first`, for datasets without an end."""

    @abstractmethod
    def reads(self, states: Sequence[FlexState | Remaining]) -> ReadCounts:
        """How often each sample was read, from the saved `states` of readers 0, 1, ..."""


class FolderShard(WorkerShard):
    """One reader's slice of a folder of shards."""

    def __init__(
        self,
        loader: WebdatasetSampleLoaderDataset,
        *,
        factory: BaseWebdatasetFactory,
        before: int,
        worker_config: ReaderConfig,
    ):
        """Divides the samples of `factory` among readers.

        Earlier datasets of the blend have `before` samples.

        Raises:
            DataError: a reader would have no sample. Energon cannot repeat an empty shard, and
                would blend the other datasets without this one.
        """
        super().__init__(loader, worker_config=worker_config)
        self._factory = factory
        self._before = before
        whole = self.slices(0, 1)
        if (count := whole[-1] - whole[0]) < worker_config.readers:
            raise DataError(
                f"{factory.path} gives {count} samples, fewer than the {worker_config.readers}"
                f" readers ({worker_config.world_size} data-parallel ranks x"
                f" {max(1, worker_config.num_workers)} workers); lower dataset.num_workers, start"
                " fewer processes, or take this dataset out of the blend"
            )
        workers = range(max(1, worker_config.num_workers))
        slices = [self.slices(worker_config.reader(w), worker_config.readers) for w in workers]
        set_slices(loader, slices)

    @property
    def has_passes(self) -> bool:
        return self._factory.shuffle_over_epochs == 1

    def slices(self, reader: int, readers: int) -> Sequence[int]:
        """Bounds, ascending, of the slices that reader number `reader` reads in a pass."""
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
        """Does nothing, because a pass over a folder always begins at its start."""

    def reads(self, states: Sequence[FlexState | Remaining]) -> ReadCounts:
        """How often each sample was read; each reader counts as at most one pass behind.

        Slow readers have longer samples. If they caught up with all passes, the run would train on
        long samples alone.
        """
        passes = [0 if isinstance(state, Remaining) else passes_read(state) for state in states]
        bounds = [self.slices(reader, len(states)) for reader in range(len(states))]
        begin, end, least = bounds[0][0], bounds[-1][-1], max(passes) - 1
        times = np.zeros(end - begin, np.int32)
        cuts = np.zeros(end - begin, bool)
        for slices, state, done in zip(bounds, states, passes, strict=True):
            times[slices[0] - begin : slices[-1] - begin] = max(done, least) + 1
            cuts[np.array(slices[:-1]) - begin] = True
            begun = None if isinstance(state, Remaining) else unread(slices, state)
            for start, stop in pairwise(slices) if begun is None else begun:
                times[start - begin : stop - begin] -= 1
        behind = sum(done < least for done in passes)
        return ReadCounts(begin=begin, times=times, cuts=cuts, behind=behind)
