"""Order of samples, their division over ranks, and a check that a saved state has this order.

1. BucketSampler  samples of one shape share a batch, and every rank has a batch of that shape at
                  each step
2. SampleStream   one sample at a time, divided among ranks and workers

Buckets, batch sizes and each rank's samples equal those of AutoModel's SequentialBucketSampler,
with two differences: the number of latent frames is part of a bucket, since other latents cannot be
stacked, and with `shuffle` the batches of all buckets are mixed, where AutoModel ends one bucket
before it begins the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from dit.data.export.caches import open_samples
from dit.data.export.samples import NumberedSamples, SizeBucket
from dit.data.rejections import DataError

logger = logging.getLogger(__name__)


def share_of(members: np.ndarray, *, rank: int, world: int) -> np.ndarray:
    """Every `world`-th of `members`, from number `rank` on.

    Members repeat until `world` divides their number.
    """
    return np.resize(members, -(-len(members) // world) * world)[rank::world]


def check_rank(rank: int, world: int) -> None:
    """Raises ValueError unless `rank` is from 0 to `world` - 1."""
    if not 0 <= rank < world:
        raise ValueError(
            f"dp_rank={rank} must lie in 0 to {world - 1}, because dp_world_size={world}"
        )


def check_same_order(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ValueError unless the `order` in the saved `state` equals `own`.

    `own` has all that determines the order of the loader that is to continue. A state that another
    program's loader saved has no `order`.
    """
    stored = state.get("order")
    if not isinstance(stored, Mapping):
        raise ValueError(
            f"the state has the keys {sorted(state)}, and was not saved by dit.data.export; begin"
            " an epoch without it"
        )
    if changes := [f"{n}={stored.get(n)!r} -> {own[n]!r}" for n in own if stored.get(n) != own[n]]:
        raise ValueError(
            f"this state belongs to another order of samples ({', '.join(changes)}), so continuing"
            " would repeat some and leave out others; give the values and the data of the stopped"
            " run, or begin an epoch without the state"
        )


def dynamic_batch_size(bucket: SizeBucket, *, base: int, resolution: tuple[int, int]) -> int:
    """Number of samples in a batch of `bucket`, at least 1, as AutoModel computes it.

    It is `base` for pictures of (width, height) `resolution`, larger for smaller pictures and
    smaller for larger ones. The number of frames has no influence.
    """
    return max(1, int(base / (bucket.pixels / (resolution[0] * resolution[1]))))


class BucketSampler(Sampler[list[int]]):
    """Sampler of torch's DataLoader that yields the list of sample indices of each batch.

    Its state is {epoch, batches_yielded, ended} and everything that decides the order; it is equal
    on all ranks.

    Raises:
        ValueError: a number is out of its range.
        DataError: no bucket fills a batch.
    """

    def __init__(
        self,
        samples: NumberedSamples,
        *,
        batch_size: int,
        ranks: tuple[int, int] = (0, 1),
        base_resolution: tuple[int, int] | None = None,
        drop_last: bool = True,
        shuffle: bool = True,
        seed: int = 42,
    ):
        """Divides `samples` among the ranks; `ranks` is (rank, number of ranks).

        A batch of one rank has `batch_size` samples. With `base_resolution` (width, height) that is
        the number for pictures of this size, and others have more or fewer (`dynamic_batch_size`).
        """
        check_rank(*ranks)
        sides = (1, 1) if base_resolution is None else tuple(base_resolution)
        if len(sides) != 2 or not all(type(n) is int and n > 0 for n in (batch_size, *sides)):
            raise ValueError(
                f"{batch_size=} must be a whole number of at least 1, and {base_resolution=}"
                " two such numbers or None"
            )
        self._samples, self._ranks = samples, ranks
        self._drop_last, self._shuffle, self._seed = drop_last, shuffle, seed
        self._batch_size, self._resolution = batch_size, base_resolution
        order = np.argsort(samples.bucket_of, kind="stable")
        ends = np.bincount(samples.bucket_of, minlength=len(samples.buckets)).cumsum()
        self._members = np.split(order, ends[:-1])
        self.epoch, self.batches_yielded, self._first = 0, 0, 0
        self._ended, self._loaded_end = False, False
        self._check_not_empty()

    @property
    def start(self) -> int:
        """Number of batches that the next pass skips, because they came before a loaded state."""
        return self._first

    def size_of(self, bucket: SizeBucket) -> int:
        """Number of samples in a batch of `bucket`."""
        if self._resolution is None:
            return self._batch_size
        return dynamic_batch_size(bucket, base=self._batch_size, resolution=self._resolution)

    def __len__(self) -> int:
        """Number of batches of this rank in an epoch, equal on every rank."""
        return sum(map(self._batches_in, range(len(self._members))))

    def __iter__(self) -> Iterator[list[int]]:
        # Loaders make iterators that they never use, so a pass begins with its first batch.
        first, self._first = self._first, 0
        self.batches_yielded, self._ended, self._loaded_end = first, False, False
        for batch in self._batches()[first:]:
            self.batches_yielded += 1
            yield batch
        self._ended = True

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, which decides its order.

        A pass of another epoch starts from its beginning. If a loaded state is in this epoch, the
        pass starts from that state: it has no batches if the state was saved after the last one.
        """
        if epoch != self.epoch:
            self.epoch, self.batches_yielded, self._first, self._ended = epoch, 0, 0, False
        elif self._loaded_end:
            self._first = len(self)  # a trainer may save after the last batch, in its epoch
        self._loaded_end = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batches_yielded": self.batches_yielded,
            "ended": self._ended,
            "order": self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batches of `state`; if its pass was complete, a new one begins.

        If `set_epoch` has already chosen a later pass, a state at the beginning or end of its own
        pass changes nothing.

        Raises:
            ValueError: the state belongs to another order of samples.
        """
        check_same_order(state, self._identity)
        if state["batches_yielded"] in (0, len(self)) and self.epoch > state["epoch"]:
            return  # the trainer has called set_epoch for the next pass before
        self.epoch, self.batches_yielded = state["epoch"], state["batches_yielded"]
        self._ended = self._loaded_end = state["ended"]
        self._first = 0 if state["ended"] else state["batches_yielded"]

    @property
    def _identity(self) -> dict[str, Any]:
        """Everything that determines the order, except the epoch."""
        return {
            "samples": len(self._samples),
            "dataset": self._samples.fingerprint,
            "dp_world_size": self._ranks[1],
            "batch_size": self._batch_size,
            "base_resolution": self._resolution and list(self._resolution),
            "drop_last": self._drop_last,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _batches_in(self, number: int) -> int:
        size, (_, world) = self.size_of(self._samples.buckets[number]), self._ranks
        own = -(-len(self._members[number]) // world)
        return own // size if self._drop_last else -(-own // size)

    def _batches(self) -> list[list[int]]:
        rng = np.random.default_rng((self._seed, self.epoch))  # the same on every rank
        found = list[list[int]]()
        buckets = self._samples.buckets
        for number in sorted(range(len(buckets)), key=lambda n: buckets[n].pixels):
            members, size = self._members[number], self.size_of(buckets[number])
            if self._shuffle:
                members = rng.permutation(members)
            mine = share_of(members, rank=self._ranks[0], world=self._ranks[1]).tolist()
            stop = self._batches_in(number) * size
            found += [mine[at : at + size] for at in range(0, stop, size)]
        if self._shuffle:
            found = [found[number] for number in rng.permutation(len(found))]
        return found

    def _check_not_empty(self) -> None:
        """Logs a warning if some buckets never fill a batch.

        Raises:
            DataError: no bucket fills a batch.
        """
        unused = [
            len(self._members[n]) for n in range(len(self._members)) if not self._batches_in(n)
        ]
        if not unused:
            return
        said = (
            f"{sum(unused)} of {len(self._samples)} samples are never returned: their buckets"
            f" ({len(unused)}) do not fill a batch (batch_size={self._batch_size}) on every rank"
            f" (dp_world_size={self._ranks[1]}), and drop_last is true; give drop_last=False or a"
            " smaller batch_size"
        )
        if not len(self):
            raise DataError(said)
        logger.warning(said)


class SampleStream(IterableDataset[dict[str, Any]]):
    """The samples of one rank, one at a time, divided over the workers of a DataLoader.

    Every rank has equally many: a few samples come twice if the number of ranks does not divide the
    number of samples. The state counts the samples that this process has returned. torchdata's
    StatefulDataLoader, or a loop over the stream itself, can continue from it. A plain DataLoader
    cannot ask its workers for their states: use `BucketLoader`.
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
        # In shared memory, so that persistent workers see the epoch of the next pass.
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def __len__(self) -> int:
        return -(-len(self.samples) // self._world)

    def set_epoch(self, epoch: int) -> None:
        """Sets the order of the next pass; for another epoch it starts from the beginning."""
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
        """Continues after the samples of `state`.

        Raises:
            ValueError: the state belongs to another order of samples.
        """
        check_same_order(state, self._identity)
        if state["samples"] in (0, len(self._mine())) and self.epoch > state["epoch"]:
            return  # torchdata loads after the trainer has called set_epoch for the next pass
        self._epoch.fill_(state["epoch"])
        self._given = self._first = state["samples"]

    @property
    def _identity(self) -> dict[str, Any]:
        """Everything that determines the order, except the epoch."""
        return {
            "samples": len(self.samples),
            "dataset": self.samples.fingerprint,
            "dp_world_size": self._world,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _mine(self) -> list[int]:
        """Indices of the samples of this rank and worker, in the order of the epoch."""
        every = np.arange(len(self.samples))
        if self._shuffle:
            every = np.random.default_rng((self._seed, self.epoch)).permutation(every)
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        return share_of(every, rank=self._rank, world=self._world)[number::count].tolist()
