"""The samples of a folder one after the other, shared among ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dit.data.export.caches import open_samples
from dit.data.export.shares import check_rank, check_same_order, share_of


class SampleStream(IterableDataset[dict[str, Any]]):
    """The samples of one rank, one after the other; workers of a DataLoader share them.

    Every rank has as many: a few samples come twice where ranks do not divide them. The state is
    how many samples this process has given, so that torchdata's StatefulDataLoader, or a loop over
    the stream itself, goes on with the next one. A plain DataLoader with workers cannot ask its
    workers: use `BucketLoader`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        split: str = "train",
        dp_rank: int = 0,
        dp_world_size: int = 1,
        shuffle: bool = True,
        seed: int = 42,
    ):
        check_rank(dp_rank, dp_world_size)
        self.samples = open_samples(folder, split=split)
        self._rank, self._world, self._shuffle, self._seed = dp_rank, dp_world_size, shuffle, seed
        self._given, self._first = 0, 0
        # In shared memory: workers that persist have the epoch of the next pass, too.
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def __len__(self) -> int:
        return -(-len(self.samples) // self._world)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass, which begins anew unless it is the same epoch."""
        if epoch != self.epoch:
            self._epoch.fill_(epoch)
            self._given, self._first = 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, self._first = self._first, 0
        self._given = first
        for index in self._mine()[first:]:
            self._given += 1
            yield self.samples[index]
        self._given = 0  # the state of a pass that has ended begins another one

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "samples": self._given, "order": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the samples of `state`.

        Raises:
            ValueError: it is of another order of samples.
        """
        check_same_order(state, self._identity)
        if state["samples"] in (0, len(self._mine())) and self.epoch > state["epoch"]:
            return  # torchdata loads after the trainer has called set_epoch for the next pass
        self._epoch.fill_(state["epoch"])
        self._given = self._first = state["samples"]

    @property
    def _identity(self) -> dict[str, Any]:
        """All that decides the order, but the epoch."""
        return {
            "samples": len(self.samples),
            "dataset": self.samples.fingerprint,
            "dp_world_size": self._world,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _mine(self) -> list[int]:
        """The samples of this rank and worker, in the order of the epoch."""
        every = np.arange(len(self.samples))
        if self._shuffle:
            every = np.random.default_rng((self._seed, self.epoch)).permutation(every)
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        return share_of(every, rank=self._rank, world=self._world)[number::count].tolist()
