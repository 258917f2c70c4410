"""Private members of Energon, and of torch's DataLoader below it; no other file uses them.

1. shards    the open tar file of a sample; the slices of a reader
2. chain     the reading buffer of Energon's packing; the hook that opens a dataset
3. loader    the worker processes: their packs, answers and end
4. states    the states of datasets that Energon saves
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from megatron.energon import SavableDataLoader, TaskEncoder, WorkerConfig
from megatron.energon.cache.no_cache import NoCachePool
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.savable_loader import SavableDatasetCheckpoint, SimpleSavableDatasetWrapper
from megatron.energon.state import FlexState
from megatron.energon.wrappers.packing_dataset import PackingDataset

from dit.data.rejections import DataError

IndexRange = tuple[int, int]
"""(start, stop): samples start ... stop - 1 of a dataset."""


def tar_of_sample(reader: ShardInfosITarReader, index: int, shard: int) -> tuple[Any, int]:
    """(open tar file with sample `index`, byte offset at which the sample ends).

    `shard` is the index of the shard that has the sample.
    """
    pointer = reader._get_itar_sample_pointer(index)
    tar = reader._get_itarfile_cached(reader.shard_tar_file_idxs[shard])
    return tar, pointer.byte_offset + pointer.byte_size


def set_slices(loader: WebdatasetSampleLoaderDataset, slices: Sequence[Sequence[int]]) -> None:
    """Sets for each worker of this rank the bounds of the slices that it reads in a pass."""
    loader.workers_slice_offsets = list(slices)


class OpenPacking(PackingDataset, ABC):
    """Energon's packing with a buffer to which samples can return, and whose size adapts."""

    def __init__(self, dataset: SavableDataset, *, buffer_size: int, capacity: int, **kwargs: Any):
        """Sets the buffer's size: `buffer_size` samples, or as many as have `capacity` tokens.

        The larger of the two numbers of samples counts.
        """
        self._at_least, self._capacity = buffer_size, capacity
        super().__init__(dataset, buffer_size=buffer_size, **kwargs)

    @abstractmethod
    def length_of(self, sample: Any) -> int:
        """Number of tokens that `sample` takes of a pack's capacity."""

    def put_back(self, samples: list[Any]) -> None:
        """Returns `samples` to the reading buffer, which is empty while groups are chosen."""
        self._reading_buffer.extend(samples)

    def _fill_reading_buffer(self, source_iter: Iterator, log_progress: bool = False) -> bool:
        del log_progress  # every worker would draw a progress bar of its own
        self.buffer_size, measured, held = self._at_least, 0, 0
        while super()._fill_reading_buffer(source_iter):
            samples = self._reading_buffer.buffer
            held += sum(map(self.length_of, samples[measured:]))
            if held >= self._capacity:
                return True
            measured = len(samples)
            # Energon reads up to this number: so each sample is measured before the next is read.
            self.buffer_size = measured + 1
        return False


class DatasetOpener(TaskEncoder, ABC):
    """Energon's task encoder, with a method that opens each dataset of a blend."""

    @abstractmethod
    def open_dataset(
        self, dataset: LoadedDataset, worker_rotation_offset: int, worker_config: WorkerConfig
    ) -> SavableDataset:
        """Opens the chain of stages of one dataset, from its shards to cooked samples."""

    def _load_dataset(
        self, dataset: LoadedDataset, worker_rotation_offset: int, worker_config: WorkerConfig
    ) -> SavableDataset:
        return self.open_dataset(dataset, worker_rotation_offset, worker_config)


class WatchedLoader(SavableDataLoader):
    """Energon's loader, which raises an error if a worker has died."""

    @property
    def newest_packs(self) -> list[int]:
        """The index of the newest pack from each worker."""
        return self._worker_sample_counters

    @newest_packs.setter
    def newest_packs(self, indices: list[int]) -> None:
        self._worker_sample_counters = indices

    def worker_checkpoints(self, newest: Sequence[int]) -> list[SavableDatasetCheckpoint]:
        """For each worker, its newest snapshot not later than its pack number `newest[worker]`."""
        return self._worker_command("get_checkpoint", list(newest))

    def shutdown(self) -> None:
        """Ends the worker processes."""
        processes: Any = self._iterator
        self._iterator = self._epoch_iterator = None
        if processes is not None:
            processes._shutdown_workers()

    def check_alive(self) -> None:
        """Raises DataError if a worker process has died."""
        processes: Any = self._iterator
        workers = [] if processes is None else processes._workers
        dead = [worker.pid for worker in workers if not worker.is_alive()]
        if dead:
            raise DataError(worker_died(f"pid {', '.join(map(str, dead))}"))

    def _worker_command(self, *cmd_args: Any) -> list[Any]:
        self.check_alive()
        for commands in self.cmd_queues:
            commands.put(cmd_args)
        answers: dict[int, Any] = {}
        for results in self.result_queues:
            answers |= self._answer(results)
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return [answers[worker] for worker in range(self.num_workers)]

    def _answer(self, results: Any) -> dict[int, Any]:
        while True:
            try:
                return results.get(timeout=1)
            except queue.Empty:
                self.check_alive()


def in_this_process(chain: SavableDataset) -> SimpleSavableDatasetWrapper:
    """Wraps `chain` as Energon does for a loader without workers.

    The wrapper yields (worker id, sample index, sample), as a worker process would.
    """
    return SimpleSavableDatasetWrapper(chain, chain.worker_config, cache_pool=NoCachePool())


def worker_died(which: str) -> str:
    """Error message for a loader process (`which`: its id) that has died."""
    return (
        f"a loader process has died ({which}). Did memory run out? Lower dataset.num_workers"
        ", dataset.packing_buffer_size or dataset.shuffle_buffer_size; a full /dev/shm also"
        " ends a loader. Then start again: the run resumes from its last checkpoint"
    )


def nested_states(state: FlexState) -> Iterator[FlexState]:
    """Yields the state of a dataset, then those of the datasets it reads from, outermost first."""
    yield state
    for inner in state.get("datasets", ()):
        yield from nested_states(inner)


def buffered_keys(chain: FlexState) -> list[tuple[Any, ...]]:
    """The restore keys of all samples in the buffers of the state `chain`."""
    buffers = [v for state in nested_states(chain) for v in state.values() if isinstance(v, dict)]
    keys = [key for buffer in buffers for key in buffer.get("_restore_keys", ())]
    # The key of a group holds those of its samples.
    return [sample for key in keys for sample in [k for k in key if isinstance(k, tuple)] or [key]]


def passes_read(state: FlexState) -> int:
    """Number of complete passes of a reader over its shards, in its saved `state`."""
    return state["_epoch_count"]


def unread(slices: Sequence[int], state: FlexState) -> list[IndexRange]:
    """Index ranges that a reader has not read in this pass.

    `slices` are the bounds of the reader's slices, and `state` is its saved state.
    """
    ranges = list(pairwise(slices))
    if state["_pending_slices_offset"] is None:
        return ranges
    active = [one for one in state["_active_slice_state"] if one is not None]
    pending = state["_pending_slice_indexes"] or ()
    return [(one.current, slices[one.index + 1]) for one in active] + [ranges[i] for i in pending]


def unwrapped(state: FlexState, *, chain: str) -> tuple[FlexState, int | None]:
    """Splits `state`, which Energon's loader has saved, into (inner, packs).

    `inner` is the state of the dataset of class `chain`, without the states of the loader's
    wrappers around it. `packs` is the number of packs made so far, or None if the outermost wrapper
    has no such count.
    """
    made = state.get("_sample_index")
    while state["__class__"] != chain:
        (state,) = state["datasets"]
    return state, made


def wrapped(state: FlexState, dataset: Any, *, chain: type, made: int) -> FlexState:
    """Puts `state` inside the states of the wrappers that Energon's loader has around a chain.

    `dataset` is the outermost wrapper, and `chain` is the class of the dataset to which `state`
    belongs. `made` is the number of packs made so far, which one wrapper saves. Which wrappers
    there are depends on whether the loader has workers.
    """
    if isinstance(dataset, chain):
        return state
    inner = wrapped(state, dataset.dataset, chain=chain, made=made)
    around = FlexState(__class__=type(dataset).__name__, datasets=[inner])
    if isinstance(dataset, SimpleSavableDatasetWrapper):
        around["_sample_index"] = made
    return around
