"""Samples of one shape share a batch, and every rank has a batch of that shape at each step.

Buckets, batch sizes and shares of ranks are those of AutoModel's SequentialBucketSampler. Two
things differ: the number of latent frames is part of a bucket, since other latents cannot be
stacked, and with `shuffle` the batches of all buckets are mixed, where AutoModel ends one bucket
before it begins the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from dit.data.export.samples import NumberedSamples, SizeBucket
from dit.data.export.shares import check_rank, check_same_order, share_of
from dit.data.rejections import DataError

logger = logging.getLogger(__name__)


def dynamic_batch_size(bucket: SizeBucket, *, base: int, resolution: tuple[int, int]) -> int:
    """Samples in a batch of this bucket, as AutoModel computes it: frames do not count."""
    return max(1, int(base / (bucket.pixels / (resolution[0] * resolution[1]))))


class BucketSampler(Sampler[list[int]]):
    """Numbers of samples, a list for each batch.

    The state is {epoch, batches_yielded, ended} and what decides the order, the same on all ranks.

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
        """`ranks` is (rank, world); `base_resolution` makes the batch size dynamic."""
        check_rank(*ranks)
        sides = (1, 1) if base_resolution is None else tuple(base_resolution)
        if len(sides) != 2 or not all(type(n) is int and n > 0 for n in (batch_size, *sides)):
            raise ValueError(
                f"{batch_size=} and {base_resolution=}: a whole number and two, of at least 1"
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
        """Batches that the next pass leaves out, since a loaded state has them."""
        return self._first

    def size_of(self, bucket: SizeBucket) -> int:
        """Samples in a batch of this bucket."""
        if self._resolution is None:
            return self._batch_size
        return dynamic_batch_size(bucket, base=self._batch_size, resolution=self._resolution)

    def __len__(self) -> int:
        """Batches of this rank in an epoch; every rank has as many."""
        return sum(map(self._batches_in, range(len(self._members))))

    def __iter__(self) -> Iterator[list[int]]:
        # Loaders make iterators that they never ask, so the place is taken with the first batch.
        first, self._first = self._first, 0
        self.batches_yielded, self._ended, self._loaded_end = first, False, False
        for batch in self._batches()[first:]:
            self.batches_yielded += 1
            yield batch
        self._ended = True

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass.

        It begins anew, unless a state of the same epoch was loaded: then it has the rest of it.
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
        """Goes on after the batches of `state`; after a pass that has ended comes a whole one.

        Raises:
            ValueError: it is of another order of samples.
        """
        check_same_order(state, self._identity)
        if state["batches_yielded"] in (0, len(self)) and self.epoch > state["epoch"]:
            return  # the trainer has called set_epoch for the next pass before
        self.epoch, self.batches_yielded = state["epoch"], state["batches_yielded"]
        self._ended = self._loaded_end = state["ended"]
        self._first = 0 if state["ended"] else state["batches_yielded"]

    @property
    def _identity(self) -> dict[str, Any]:
        """All that decides the order, but the epoch."""
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
        """Says which buckets never make a batch."""
        unused = [
            len(self._members[n]) for n in range(len(self._members)) if not self._batches_in(n)
        ]
        if not unused:
            return
        said = (
            f"{sum(unused)} of {len(self._samples)} samples never come: their {len(unused)} buckets"
            f" are smaller than a batch (batch_size={self._batch_size}) on each of"
            f" {self._ranks[1]} ranks, and drop_last is true; give drop_last=False or a smaller"
            " batch_size"
        )
        if not len(self):
            raise DataError(said)
        logger.warning(said)
