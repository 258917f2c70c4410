"""Energon's savable loader where it would hang, die of a signal, or resume at the wrong place."""

from __future__ import annotations

import atexit
import os
import queue
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any, TypeVar

import torch
from megatron.energon import SavableDataLoader
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.rng import SystemRng
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
    SimpleSavableDatasetWrapper,
)
from megatron.energon.state import FlexState
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from dit.data.energon.stages import WorkerBatch, WorkerOutput
from dit.data.energon.worker_shards import SampleId, WorkerShard
from dit.data.loader_state import LoaderState, WorkerState
from dit.data.rejections import DataError

Link = TypeVar("Link", bound=SavableDataset)

_DYING_S = 2.0  # within which the end of a process is seen after that of its connections


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What the workers have given, at one time; cheap."""

    newest: tuple[int, ...]
    """Index of the newest pack of each."""
    since: dict[int, tuple[list[tuple[SampleId, ...]], int]]
    """By worker its packs since a snapshot, of which the list may have more by now."""


class ResumableLoader(SavableDataLoader):
    """Loader of one rank.

    It asks no dead worker for its state, and outlives the signals that ask the trainer to save.
    """

    def __init__(self, dataset: SavableDataset, *, checkpoint_every_sec: float, ahead: int = 0):
        """From a mark to the newest pack are at most `ahead` packs."""
        self.chain = dataset
        self._since: dict[int, list[tuple[SampleId, ...]]] = {}
        self._skip = 0
        workers = dataset.worker_config.num_workers
        super().__init__(
            dataset,
            checkpoint_every_sec=checkpoint_every_sec,
            # One at least is older than a mark: two snapshots are 2 * workers packs apart.
            n_checkpoints=2 * max(1, workers) + 1 + -(-ahead // (2 * max(1, workers) ** 2)),
            # Without workers it would collect and freeze the trainer's own objects.
            gc_collect_every_n_steps=100 if workers else 0,
            watchdog_timeout_seconds=None,  # it touches CUDA, which a forked process must not
        )
        self.pin_memory = torch.cuda.is_available()  # else torch warns at each start
        if workers:
            self.worker_init_fn = partial(_start_worker, self.worker_init_fn, os.getpid())
            # Else multiprocessing, at exit, sends one SIGTERM and waits. The first is for programs
            # and comes before torch's own end, the second for children of multiprocessing, and
            # comes before the queues close, at priority 10.
            atexit.register(_shutdown, weakref.ref(self))
            Finalize(None, _shutdown, args=(weakref.ref(self),), exitpriority=20)

    def __iter__(self) -> Iterator[WorkerBatch]:
        for delivery in self._received():
            if self._skip and not delivery.error:
                self._skip -= 1
                continue
            if self.num_workers:  # else there are no snapshots but the one that is saved
                if delivery.follows_snapshot or delivery.worker not in self._since:
                    self._since[delivery.worker] = []  # a mark may keep the old one
                self._since[delivery.worker].append(delivery.samples)
            yield delivery

    def _received(self) -> Iterator[WorkerBatch]:
        (last,) = links(self.chain, WorkerOutput)
        try:
            yield from map(last.received, super().__iter__())
        except (OSError, EOFError):  # a pack that is fetched from a worker which is dying
            deadline = time.monotonic() + _DYING_S
            while time.monotonic() < deadline:
                self._check_alive()
                time.sleep(0.01)
            raise

    def mark(self) -> Snapshot:
        """Where `freeze` is to say that the readers stand, while later packs are taken."""
        return Snapshot(
            newest=tuple(self._worker_sample_counters),
            since={worker: (packs, len(packs)) for worker, packs in self._since.items()},
        )

    def freeze(self, mark: Snapshot) -> list[WorkerState]:
        """Where all readers stood at `mark`, before which the first pack was taken.

        Without workers that is where they stand: no pack may have been taken since.
        """
        if self.num_workers == 0:
            alone: Any = self.dataset
            whole = alone.save_state()
            return [WorkerState(chain=_chain_in(whole), made=whole["_sample_index"])]
        while True:
            saved = self._worker_command("get_checkpoint", list(mark.newest))
            # A worker that is asked in the instant of its start answers with no state, and a resume
            # from that would give other packs. Asked again, it waits until it has one.
            if all(one.state for one in saved):
                return [_position(one, *mark.since.get(w, ([], 0))) for w, one in enumerate(saved)]
            time.sleep(0.01)

    def shares(self) -> list[WorkerShard]:
        """One for each dataset; none where Energon does not read each in passes of its own."""
        endless = [link for link in links(self.chain, RepeatDataset) if link.repeats is None]
        below = [list(links(link, WorkerShard)) for link in endless]
        shares = list(links(self.chain, WorkerShard))
        plain = below == [[share] for share in shares] and all(s.has_passes for s in shares)
        return shares if plain else []

    def thaw(self, position: LoaderState) -> None:
        """Continues at a position of `freeze`, or begins there; before the first pack is taken."""
        readers = position.unpickled()
        for number, share in enumerate(links(self.chain, WorkerShard)):
            share.inherit({w: r.left[number] for w, r in enumerate(readers) if r.left})
        if position.dealt:
            self.worker_config.seed_offset = SystemRng.get_seed_from_args(*position.seed)
        if any(reader.chain is None for reader in readers):
            return  # none has begun
        if self.num_workers:
            self._since = {worker: list(reader.since) for worker, reader in enumerate(readers)}
            for last in links(self.chain, WorkerOutput):
                last.skips({worker: len(since) for worker, since in self._since.items()})
            states: Any = [self._checkpoint(reader) for reader in readers]
        else:
            self._skip = len(readers[0].since)
            states = [_around(readers[0], self.dataset)]
        self.restore_state_rank(
            SavableDataLoaderState(
                worker_states=states, next_worker_id=position.next_worker, micro_batch_size=None
            )
        )
        if self.num_workers:
            # Energon forgets the packs between a worker's snapshot and the saved position, so a
            # state saved soon after a resume would give those of the slower workers again.
            self._worker_sample_counters = [r.made + len(r.since) - 1 for r in readers]

    def _checkpoint(self, reader: WorkerState) -> SavableDatasetCheckpoint:
        state = SavableDatasetState(
            rng=None,  # type: ignore[arg-type]  # Energon seeds them then; nothing here draws
            dataset_state=_around(reader, self.dataset.dataset),
            sample_index=reader.made,
        )
        return SavableDatasetCheckpoint(state=state, offset=len(reader.since))

    def shutdown(self) -> None:
        """Ends the worker processes."""
        processes: Any = self._iterator
        self._iterator = self._epoch_iterator = None
        if processes is not None:
            processes._shutdown_workers()

    def _worker_command(self, *cmd_args: Any) -> list[Any]:
        """Energon's, which waits for ever for the answer of a worker that has died."""
        self._check_alive()
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
                self._check_alive()

    def _check_alive(self) -> None:
        processes: Any = self._iterator
        workers = [] if processes is None else processes._workers
        dead = [worker.pid for worker in workers if not worker.is_alive()]
        if dead:
            raise DataError(worker_died(f"pid {', '.join(map(str, dead))}"))


def _position(
    saved: SavableDatasetCheckpoint, packs: list[tuple[SampleId, ...]], count: int
) -> WorkerState:
    """From a snapshot of a worker, and its packs since the one before a mark."""
    assert saved.state is not None
    since = packs[:count] if saved.offset else []
    assert len(since) == saved.offset, "packs since a snapshot have been lost"
    return WorkerState(
        chain=_chain_in(saved.state.dataset_state),
        made=saved.state.sample_index,
        since=tuple(since),
    )


def links(dataset: Any, kind: type[Link]) -> Iterator[Link]:
    """The links of one kind in a chain of datasets, those of a blend in its order."""
    if isinstance(dataset, kind):
        yield dataset
    for inner in getattr(dataset, "datasets", ()):
        yield from links(inner, kind)


def _chain_in(state: FlexState) -> FlexState:
    """State of our chain in that of the links which Energon's loader puts around it."""
    while state["__class__"] != WorkerOutput.__name__:
        (state,) = state["datasets"]
    return state


def _around(reader: WorkerState, dataset: Any) -> FlexState:
    """The inverse: what Energon puts around a chain depends on whether there are workers."""
    if isinstance(dataset, WorkerOutput):
        assert reader.chain is not None
        return reader.chain
    state = FlexState(__class__=type(dataset).__name__, datasets=[_around(reader, dataset.dataset)])
    if isinstance(dataset, SimpleSavableDatasetWrapper):
        state["_sample_index"] = reader.made
    return state


@contextmanager
def deaths_in_words() -> Iterator[None]:
    """Says what to do about a loader process that dies while the trainer does anything else.

    torch reports it from a signal handler: its error comes up wherever the trainer stands.

    Raises:
        DataError: instead of torch's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(worker_died(str(error).strip())) from error


def worker_died(which: str) -> str:
    """Message for a loader process that is no more."""
    return (
        f"a loader process has died ({which}). Killed for want of memory? Lower dataset.num_workers"
        ", dataset.packing_buffer_size or dataset.shuffle_buffer_size; a full /dev/shm ends a"
        " loader as well. Then start again: the run resumes from its last checkpoint"
    )


def _shutdown(loader: weakref.ref[ResumableLoader]) -> None:
    if (alive := loader()) is not None:
        alive.shutdown()


def _start_worker(energons: Callable[[int], None], trainer: int, worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach every process of a job, also this one.

    The trainer saves then, and needs the workers' positions. So Ctrl-C is left to it, and of
    SIGTERM only the second ends a worker: the one that comes from the trainer as it leaves.
    """
    energons(worker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_the_next)
    Thread(target=_end_with, args=(trainer,), daemon=True).start()


def _end_with(trainer: int) -> None:
    """Ends this worker when the trainer has been killed, also while it waits for a file.

    torch looks for the trainer only where a worker waits for orders.
    """
    while os.getppid() == trainer:
        time.sleep(1)
    os._exit(1)


def _obey_the_next(signal_number: int, _frame: object) -> None:
    signal.signal(signal_number, signal.SIG_DFL)
