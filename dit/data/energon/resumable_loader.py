"""Energon's savable loader, changed where it would hang, die of a signal, or resume wrongly.

1. ResumableLoader    packs of one rank; saves and restores the positions of its workers
2. workers            they survive signals to the job, and end with the trainer
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
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
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.rng import SystemRng
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from dit.data.energon.internals import WatchedLoader, unwrapped, worker_died, wrapped
from dit.data.energon.stages import WorkerBatch, WorkerOutput
from dit.data.energon.worker_shards import SampleId, WorkerShard
from dit.data.loader_state import LoaderState, WorkerState
from dit.data.rejections import DataError

Stage = TypeVar("Stage", bound=SavableDataset)

_DYING_S = 2.0  # seconds within which a process is seen to be dead after its connections closed


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The position of a loader: how many packs each worker has made.

    Creating one is cheap, because no worker is asked.
    """

    newest: tuple[int, ...]
    """Index of the newest pack of each worker."""
    since: dict[int, tuple[list[tuple[SampleId, ...]], int]]
    """Worker -> (list of its packs since its state was last saved, number of these packs that this
    position includes). The loader continues to append to the list."""


class ResumableLoader(WatchedLoader):
    """The loader of one rank, whose position can be saved and restored.

    It never waits for the state of a dead worker, and survives the signals that ask the trainer to
    save.
    """

    def __init__(self, dataset: SavableDataset, *, checkpoint_every_sec: float, ahead: int = 0):
        """Opens the loader; each worker keeps a snapshot of its state every `checkpoint_every_sec`.

        Between `snapshot` and `state_dict`, up to `ahead` more packs may be read.
        """
        self.chain = dataset
        self._since: dict[int, list[tuple[SampleId, ...]]] = {}
        self._skip = 0
        workers = dataset.worker_config.num_workers
        super().__init__(
            dataset,
            checkpoint_every_sec=checkpoint_every_sec,
            # One at least is older than a snapshot: Energon's are 2 * workers packs apart.
            n_checkpoints=2 * max(1, workers) + 1 + -(-ahead // (2 * max(1, workers) ** 2)),
            # Without workers it would collect and freeze the trainer's own objects.
            gc_collect_every_n_steps=100 if workers else 0,
            watchdog_timeout_seconds=None,  # it touches CUDA, which a forked process must not
        )
        self.pin_memory = torch.cuda.is_available()  # else torch warns at each start
        if workers:
            self.worker_init_fn = partial(_start_worker, self.worker_init_fn, os.getpid())
            # At exit, multiprocessing sends one SIGTERM and waits, so the workers end before that.
            # Python calls the first of these before torch's own end. Children of multiprocessing
            # call the second, before the queues close at priority 10.
            atexit.register(_shutdown, weakref.ref(self))
            Finalize(None, _shutdown, args=(weakref.ref(self),), exitpriority=20)

    def __iter__(self) -> Iterator[WorkerBatch]:
        for batch in self._received():
            if self._skip and not batch.error:
                self._skip -= 1
                continue
            if self.num_workers:  # without workers only the present position can be saved
                if batch.follows_snapshot or batch.worker not in self._since:
                    self._since[batch.worker] = []  # a Snapshot may keep the old list
                self._since[batch.worker].append(batch.samples)
            yield batch

    def _received(self) -> Iterator[WorkerBatch]:
        (output,) = stages_of(self.chain, WorkerOutput)
        try:
            yield from map(output.received, super().__iter__())
        except (OSError, EOFError):  # a pack was being fetched from a worker that is dying
            deadline = time.monotonic() + _DYING_S
            while time.monotonic() < deadline:
                self.check_alive()
                time.sleep(0.01)
            raise

    def snapshot(self) -> Snapshot:
        """The present position, for a later call of `state_dict`.

        More packs may be read before that call.
        """
        return Snapshot(
            newest=tuple(self.newest_packs),
            since={worker: (packs, len(packs)) for worker, packs in self._since.items()},
        )

    def state_dict(self, at: Snapshot) -> list[WorkerState]:
        """The states of all workers at the snapshot `at`.

        The snapshot must have been made after the first pack. Without workers the result is the
        reader's present state, so no pack may have been taken since the snapshot.
        """
        if self.num_workers == 0:
            alone: Any = self.dataset
            chain, made = unwrapped(alone.save_state(), chain=WorkerOutput.__name__)
            assert made is not None
            return [WorkerState(chain=chain, made=made)]
        while True:
            saved = self.worker_checkpoints(at.newest)
            # A worker that is asked in the instant of its start answers with no state, and a resume
            # from that would give other packs. Asked again, it waits until it has one.
            if all(one.state for one in saved):
                return [_position(one, *at.since.get(w, ([], 0))) for w, one in enumerate(saved)]
            time.sleep(0.01)

    def shards(self) -> list[WorkerShard]:
        """The lowest stage (WorkerShard) of each dataset, in the order of a blend.

        The list is empty unless Energon repeats every dataset without end, in whole passes.
        """
        endless = [stage for stage in stages_of(self.chain, RepeatDataset) if stage.repeats is None]
        below = [list(stages_of(stage, WorkerShard)) for stage in endless]
        shards = list(stages_of(self.chain, WorkerShard))
        plain = below == [[shard] for shard in shards] and all(s.has_passes for s in shards)
        return shards if plain else []

    def load_state_dict(self, state: LoaderState) -> None:
        """Restores the position in `state`; must be called before the first pack.

        If the workers had made no pack when `state` was saved, they begin at the start. After a
        change of the number of ranks or workers, each worker reads the samples that `state` assigns
        to it.
        """
        workers = state.unpickled()
        for number, shard in enumerate(stages_of(self.chain, WorkerShard)):
            shard.inherit({n: w.left[number] for n, w in enumerate(workers) if w.left})
        if state.dealt:
            self.worker_config.seed_offset = SystemRng.get_seed_from_args(*state.seed)
        if any(worker.chain is None for worker in workers):
            return  # none has begun
        if self.num_workers:
            self._since = {number: list(worker.since) for number, worker in enumerate(workers)}
            for output in stages_of(self.chain, WorkerOutput):
                output.skips({worker: len(since) for worker, since in self._since.items()})
            states: Any = [self._checkpoint(worker) for worker in workers]
        else:
            self._skip = len(workers[0].since)
            states = [_wrapped(workers[0], self.dataset)]
        self.restore_state_rank(
            SavableDataLoaderState(
                worker_states=states, next_worker_id=state.next_worker, micro_batch_size=None
            )
        )
        if self.num_workers:
            # Energon forgets the packs between a worker's snapshot and the saved position, so a
            # state saved soon after a resume would give those of the slower workers again.
            self.newest_packs = [worker.made + len(worker.since) - 1 for worker in workers]

    def _checkpoint(self, worker: WorkerState) -> SavableDatasetCheckpoint:
        state = SavableDatasetState(
            rng=None,  # type: ignore[arg-type]  # Energon then seeds them; nothing here draws
            dataset_state=_wrapped(worker, self.dataset.dataset),
            sample_index=worker.made,
        )
        return SavableDatasetCheckpoint(state=state, offset=len(worker.since))


def _position(
    saved: SavableDatasetCheckpoint, packs: list[tuple[SampleId, ...]], count: int
) -> WorkerState:
    """State of a worker: Energon's checkpoint `saved`, and the first `count` later `packs`."""
    assert saved.state is not None
    since = packs[:count] if saved.offset else []
    assert len(since) == saved.offset, "packs since a snapshot have been lost"
    chain, _ = unwrapped(saved.state.dataset_state, chain=WorkerOutput.__name__)
    return WorkerState(chain=chain, made=saved.state.sample_index, since=tuple(since))


def _wrapped(worker: WorkerState, dataset: Any) -> Any:
    assert worker.chain is not None
    return wrapped(worker.chain, dataset, chain=WorkerOutput, made=worker.made)


def stages_of(dataset: Any, kind: type[Stage]) -> Iterator[Stage]:
    """All stages of class `kind` in a chain of datasets, in the order of a blend."""
    if isinstance(dataset, kind):
        yield dataset
    for inner in getattr(dataset, "datasets", ()):
        yield from stages_of(inner, kind)


@contextmanager
def deaths_in_words() -> Iterator[None]:
    """A context that turns the death of a loader process into an error with a remedy.

    torch reports a death from a signal handler, so its error may be raised at any line of the
    trainer.

    Raises:
        DataError: instead of torch's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(worker_died(str(error).strip())) from error


def _shutdown(loader: weakref.ref[ResumableLoader]) -> None:
    if (alive := loader()) is not None:
        alive.shutdown()


def _start_worker(energons: Callable[[int], None], trainer: int, worker: int) -> None:
    """Start function of a worker: ignores Ctrl-C, and ends only at a second SIGTERM.

    Ctrl-C and a scheduler's SIGTERM reach all processes of a job. The trainer then saves a
    checkpoint, for which it needs the workers' positions; as it leaves, it sends the workers the
    second SIGTERM.

    `energons` is Energon's own start function, which is called first with the number `worker`.
    `trainer` is the process id of the trainer: the worker ends when that process has ended.
    """
    energons(worker)
    sys.excepthook = partial(_show_unless_the_trainer_left, sys.excepthook)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_the_next)
    Thread(target=_end_with, args=(trainer,), daemon=True).start()


def _show_unless_the_trainer_left(
    show: Callable[..., object], kind: type[BaseException], error: BaseException, trace: object
) -> None:
    """Excepthook of a worker: calls `show` for all errors but ConnectionError and EOFError.

    These two errors only mean that the trainer was killed, which broke its connections.
    """
    if not isinstance(error, (ConnectionError, EOFError)):
        show(kind, error, trace)


def _end_with(trainer: int) -> None:
    """Ends this worker when the process `trainer` has been killed, even while it waits for a file.

    torch notices the trainer's end only while a worker waits for orders.
    """
    while os.getppid() == trainer:
        time.sleep(1)
    os._exit(1)


def _obey_the_next(signal_number: int, _frame: object) -> None:
    signal.signal(signal_number, signal.SIG_DFL)
