"""Engines that hand blocks to workers as they become free, and yield results in block order.

1. InProcess   all work in this process
2. Processes   worker processes of this machine
3. RayWorkers  workers of a Ray cluster, on any number of machines

If a worker dies, another one repeats its blocks sample by sample; a sample that kills this worker,
too, is refused. Ray restarts a worker whose process or machine is lost, and repeats its blocks; all
machines need the input folder at the same path, and only this process writes shards.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from data_prep.engine.block_worker import Block, BlockWorker, RefusedResult
from data_prep.refusals import PrepError, Reason

_DEATHS = 4  # workers that may die with the same block before they begin one of its samples
_IN_FLIGHT = 2  # blocks of a worker: it encodes one and decodes the next
_WINDOW = 4  # blocks for each worker that may wait for an earlier, slower one
_WINDOW_OF_RAY = 8


class Engine(Protocol):
    """Interface of engines, which run a worker on blocks and return the results in order."""

    def run(self, work: BlockWorker, blocks: Iterable[Block]) -> Iterator[list[Any]]: ...


@dataclass(frozen=True)
class InProcess:
    """Engine that works in this process, for small datasets and for debuggers."""

    device: str = "cpu"

    def run(self, work: BlockWorker, blocks: Iterable[Block]) -> Iterator[list[Any]]:
        return work.on(self.device).run(blocks)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    device: str
    held: deque[_Job] = field(default_factory=deque)


@dataclass
class _Job:
    number: int
    block: Block
    deaths: int = 0
    killers: set[int] = field(default_factory=set)  # samples that killed a worker: not tried again
    at: int | None = None  # the sample that a worker has begun, if it goes sample by sample


class Processes:
    """Engine that runs blocks in worker processes on this machine."""

    def __init__(self, *, workers: int, devices: tuple[str, ...] = ("cpu",), few: int = 0):
        """Creates an engine of `workers` processes; they take `devices` in turn.

        For fewer than `few` blocks all work is done in this process, because workers start slowly.
        """
        self._workers, self._devices, self._few = workers, devices, few
        # Not fork: threads of torch and FFmpeg do not survive it.
        self._context = multiprocessing.get_context("spawn")

    def run(self, work: BlockWorker, blocks: Iterable[Block]) -> Iterator[list[Any]]:
        """Yields the results of each block, in the order of `blocks`.

        The worker processes are killed when the iterator ends or is closed.
        """
        blocks = iter(blocks)
        first = list(islice(blocks, self._few))
        if len(first) < self._few:
            yield from InProcess(self._devices[0]).run(work, first)
            return
        devices = [self._devices[i % len(self._devices)] for i in range(self._workers)]
        workers = [self._start(work, device) for device in devices]
        try:
            yield from self._ordered(work, workers, chain(first, blocks))
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.join()

    def _start(self, work: BlockWorker, device: str) -> _Worker:
        ours, theirs = self._context.Pipe()
        # A daemon, so that it does not outlive this process.
        process = self._context.Process(target=_serve, args=(work, device, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, device)

    def _ordered(
        self, work: BlockWorker, workers: list[_Worker], blocks: Iterator[Block]
    ) -> Iterator[list[Any]]:
        waiting: deque[_Job] = deque()
        done: dict[int, list[Any]] = {}
        jobs = (_Job(number, block) for number, block in enumerate(blocks))
        taken = given_out = 0
        while True:
            room = _WINDOW * len(workers) - (taken - given_out)
            new = list(islice(jobs, room))
            waiting.extend(new)
            taken += len(new)
            _hand_out(workers, waiting)
            if given_out in done:
                yield done.pop(given_out)
                given_out += 1
                continue
            if given_out == taken:
                return
            for pipe in wait([worker.pipe for worker in workers if worker.held]):
                number = next(i for i, worker in enumerate(workers) if worker.pipe is pipe)
                try:
                    _receive(workers[number], done)
                except (EOFError, OSError):
                    waiting.extendleft(reversed(_take_back(workers[number])))
                    workers[number] = self._start(work, workers[number].device)


def _hand_out(workers: list[_Worker], waiting: deque[_Job]) -> None:
    """Gives waiting jobs to the workers that hold the fewest, up to `_IN_FLIGHT` for each worker.

    A job that has killed a worker is given to a worker that holds no other job.
    """
    while waiting:
        worker = min(workers, key=lambda worker: len(worker.held))
        alone = waiting[0].deaths > 0 or any(job.deaths for job in worker.held)
        if len(worker.held) >= (1 if alone else _IN_FLIGHT):
            return
        job = waiting.popleft()
        job.at = None
        worker.held.append(job)
        careful = job.deaths > 0
        block = tuple(None if i in job.killers else line for i, line in enumerate(job.block))
        try:
            worker.pipe.send((block, careful))
        except OSError:
            return  # the worker is dead; the next `wait` notices


def _receive(worker: _Worker, done: dict[int, list[Any]]) -> None:
    message = worker.pipe.recv()
    if isinstance(message, int):
        worker.held[0].at = message
        return
    if isinstance(message, BaseException):
        raise message
    job = worker.held.popleft()
    for index in job.killers:
        message[index] = RefusedResult(reason=str(Reason.CRASHED), detail="twice")
    done[job.number] = message


def _take_back(worker: _Worker) -> list[_Job]:
    """Collects the unfinished jobs of a worker that has died, so that another worker can take them.

    Counts the death on each of these jobs, and adds the sample that was being processed, if known,
    to the job's `killers`.

    Raises:
        PrepError: a job has killed too many workers before they began its first sample.
    """
    worker.process.join()
    worker.pipe.close()
    jobs = list(worker.held)
    for job in jobs:
        if job.at is not None:
            job.killers.add(job.at)
        job.deaths += 1
        if job.deaths > _DEATHS + len(job.killers):
            raise PrepError(
                f"{job.deaths} workers have died (exit code {worker.process.exitcode}) before they"
                " began a sample; give a smaller --num_workers if memory is short"
            )
    return jobs


def _serve(work: BlockWorker, device: str, pipe: Connection) -> None:
    """Main function of a worker process: receives blocks and sends results through `pipe`."""
    import torch
    from tqdm import tqdm

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent process ends its workers
    # The lock that tqdm makes is a semaphore of the machine, which a killed worker leaves behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(1)
    work = work.on(device)

    def blocks() -> Iterator[Any]:
        while True:
            # No block waits in the pipe: None makes `run` finish the blocks that it has begun.
            yield None
            block, careful = pipe.recv()
            if careful:
                pipe.send(list(_one_by_one(work, block, pipe)))
                continue
            yield block
            while pipe.poll():
                block, careful = pipe.recv()
                yield block

    try:
        for results in work.run(blocks()):
            pipe.send(results)
    except (EOFError, OSError, KeyboardInterrupt):
        return
    except BaseException as error:  # noqa: BLE001 - the parent process raises it
        pipe.send(error)


def _one_by_one(work: BlockWorker, block: Block, pipe: Connection) -> Iterator[Any]:
    for index, line in enumerate(block):
        pipe.send(index)
        yield next(iter(work.run([(line,)])))[0]


class RayWorkers:
    """Engine that runs blocks in actors of a Ray cluster: that at RAY_ADDRESS, or a local one."""

    def __init__(self, *, workers: int | None):
        """Connects to the Ray cluster and decides the number of workers, which `run` starts.

        If `workers` is None, it is one for each GPU of the cluster, or one for each core if there
        are no GPUs.

        Raises:
            PrepError: Ray is not installed.
        """
        try:
            # Imported by name: pyright would read the whole source of Ray, for minutes.
            ray = import_module("ray")
        except ImportError:
            raise PrepError(
                "--engine ray needs Ray; install it with pip install 'megatron-dit[ray]'"
            ) from None
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
        resources = ray.cluster_resources()
        self._gpus = int(resources.get("GPU", 0))
        self._workers = workers or self._gpus or int(resources.get("CPU", 1))

    def run(self, work: BlockWorker, blocks: Iterable[Block]) -> Iterator[list[Any]]:
        """Yields the results of each block, in the order of `blocks`.

        The actors are killed when the iterator ends or is closed.
        """
        ray = self._ray
        device = {"num_gpus": 1} if self._gpus else {"num_cpus": 1}
        # -1 is unlimited: a lost machine is not the fault of the block that was on it.
        actor = ray.remote(max_restarts=-1, max_task_retries=-1, **device)(_Actor)
        shared = ray.put(work)
        actors = [actor.remote(shared, bool(self._gpus)) for _ in range(self._workers)]
        try:
            yield from self._ordered(actors, iter(blocks))
        finally:
            for one in actors:
                ray.kill(one)

    def _ordered(self, actors: list[Any], blocks: Iterator[Block]) -> Iterator[list[Any]]:
        """Keeps two blocks at work on each of `actors`; yields results in the order of `blocks`."""
        busy: dict[Any, tuple[int, Any]] = {}
        free, done = list(actors) * 2, dict[int, list[Any]]()
        taken = given_out = 0
        while True:
            room = min(len(free), _WINDOW_OF_RAY * len(actors) - (taken - given_out))
            for block in list(islice(blocks, max(0, room))):
                actor = free.pop(0)
                busy[actor.run.remote(block)] = taken, actor
                taken += 1
            if given_out in done:
                yield done.pop(given_out)
                given_out += 1
            elif busy:
                (ready,), _ = self._ray.wait(list(busy), num_returns=1)
                number, actor = busy.pop(ready)
                done[number] = self._ray.get(ready)
                free.append(actor)
            else:
                return


class _Actor:
    """Ray actor: a worker process on one of the cluster's machines."""

    def __init__(self, work: BlockWorker, on_gpu: bool):
        import torch

        torch.set_num_threads(1)
        self._work = work.on("cuda" if on_gpu else "cpu")

    def run(self, block: Block) -> list[Any]:
        return next(iter(self._work.run([block])))
