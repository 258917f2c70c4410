"""Hands blocks to workers of a Ray cluster, on any number of machines.

Ray restarts a worker whose process or machine is lost, and repeats its blocks. All machines need
the input folder at the same path; only this process writes shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from typing import Any

from data_prep.engine.block_worker import Block, BlockWorker
from data_prep.refusals import PrepError

_WINDOW = 8  # blocks for each worker that may wait for an earlier, slower one


class RayWorkers:
    """Actors of the cluster at RAY_ADDRESS, or of one that is started on this machine."""

    def __init__(self, *, workers: int | None):
        """One worker for each GPU of the cluster, or each core, where `workers` is None.

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
        """Results block by block; the actors end with the iterator."""
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
        """Each actor gets the next block when it finishes one; early results wait in `done`."""
        busy: dict[Any, tuple[int, Any]] = {}
        free, done = list(actors) * 2, dict[int, list[Any]]()
        taken = given_out = 0
        while True:
            room = min(len(free), _WINDOW * len(actors) - (taken - given_out))
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
    """One worker process somewhere in the cluster."""

    def __init__(self, work: BlockWorker, on_gpu: bool):
        import torch

        torch.set_num_threads(1)
        self._work = work.on("cuda" if on_gpu else "cpu")

    def run(self, block: Block) -> list[Any]:
        return next(iter(self._work.run([block])))
