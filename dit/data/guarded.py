"""Energon's savable loader where it would hang, die of a signal, or resume at the wrong place."""

from __future__ import annotations

import atexit
import pickle
import queue
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from megatron.energon import SavableDataLoader
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

from dit.data import safe_pickle
from dit.data.rejects import DataError

_STATE_CLASSES = (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
    SystemRngState,
    SliceState,
    FlexState,
)


class GuardedLoader(SavableDataLoader):
    """Loader of one rank.

    It asks no dead worker for its state, and outlives the signals that ask the trainer to save.
    """

    def __init__(self, dataset: SavableDataset, *, checkpoint_every_sec: float):
        workers = dataset.worker_config.num_workers
        super().__init__(
            dataset,
            checkpoint_every_sec=checkpoint_every_sec,
            # Without workers it would collect and freeze the trainer's own objects.
            gc_collect_every_n_steps=10 if workers else 0,
            watchdog_timeout_seconds=None,  # it touches CUDA, which a forked process must not
        )
        self.pin_memory = torch.cuda.is_available()  # else torch warns at each start
        if workers:
            self.worker_init_fn = partial(_start_worker, self.worker_init_fn)
            # Else multiprocessing, at exit, sends one SIGTERM and waits. The first is for programs
            # and comes before torch's own end, the second for children of multiprocessing, and
            # comes before the queues close, at priority 10.
            atexit.register(_shutdown, weakref.ref(self))
            Finalize(None, _shutdown, args=(weakref.ref(self),), exitpriority=20)

    def freeze(self) -> bytes:
        """Position of all readers; the first pack must have been taken."""
        while True:
            state: Any = self.save_state_rank()
            # A worker that is asked in the instant of its start answers with no state, and a resume
            # from that would give other packs. Asked again, it waits until it has one.
            if self.num_workers == 0 or all(worker.state for worker in state.worker_states):
                # Bytes, because restoring one state object twice would share its lists.
                return pickle.dumps(state)
            time.sleep(0.01)

    def thaw(self, state: bytes) -> None:
        """Continues at a position of `freeze`; before the first pack is taken."""
        restored = safe_pickle.loads(state, classes=_STATE_CLASSES)
        self.restore_state_rank(restored)
        if self.num_workers:
            # Energon forgets the packs between a worker's snapshot and the saved position, so a
            # state saved soon after a resume would give those of the slower workers again.
            self._worker_sample_counters = [
                worker.state.sample_index + worker.offset - 1 for worker in restored.worker_states
            ]

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


def _shutdown(loader: weakref.ref[GuardedLoader]) -> None:
    if (alive := loader()) is not None:
        alive.shutdown()


def _start_worker(energons: Callable[[int], None], worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach every process of a job, also this one.

    The trainer saves then, and needs the workers' positions. So Ctrl-C is left to it, and of
    SIGTERM only the second ends a worker: the one that comes from the trainer as it leaves.
    """
    energons(worker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_the_next)


def _obey_the_next(signal_number: int, _frame: object) -> None:
    signal.signal(signal_number, signal.SIG_DFL)
