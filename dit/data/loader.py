"""Loaders of a run: configuration -> PackedBatches, savable and checked.

1. check     folders, splits and sizes, before any process starts
2. open      Energon's chain of datasets (chain.py), its links in the loader's processes
3. receive   packs with counts; refusals beyond the tolerance, and dead workers, end the run
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data.datasets import DatasetSplit, check_readers, count_samples, train_leaves, val_leaves
from dit.data.energon.resumable_loader import ResumableLoader, Snapshot, worker_died
from dit.data.energon.stages import WorkerBatch
from dit.data.energon.task_encoder import open_training, open_validation
from dit.data.loader_state import (
    LoaderLayout,
    LoaderState,
    check_identity,
    loader_identity,
    pickled,
    places_of,
)
from dit.data.rejections import (
    MOST_NAMED,
    Bound,
    DataError,
    RefusedSample,
    RejectCounts,
    sum_counts,
)
from dit.data.reshard import reshard


def build_train_loader(config: RunConfig, *, rank: int, world_size: int) -> PackLoader:
    """Endless shuffled packs of one data-parallel rank.

    Equal `world_size` x `dataset.num_workers` give equal global batches, whatever their size.

    Raises:
        DataError: the data are missing, not prepared, or too few for the readers.
    """
    leaves = train_leaves(config)
    check_readers(leaves, ranks=world_size, workers=config.dataset.num_workers)
    bound = _bound(config, leaves, ranks=world_size)
    return PackLoader(
        lambda: open_training(config, leaves, bound, rank=rank, world_size=world_size),
        identity=loader_identity(config),
        bound=bound,
        places=places_of(config.dataset),
        endless=True,
    )


def build_val_loader(config: RunConfig, *, rank: int, world_size: int) -> PackLoader:
    """The packs rank, rank + world_size, ... of one pass over the validation samples.

    The list of all packs is fixed: neither shuffled nor dependent on ranks and workers. Each
    `iter()` begins it again. Only mock data have no end.

    Raises:
        DataError: there is no `val` split (the message says what to do), or as for training.
    """
    leaves = val_leaves(config)
    bound = _bound(config, leaves, ranks=1)
    return PackLoader(
        lambda: open_validation(config, leaves, bound),
        identity={},
        bound=bound,
        endless=False,
        share=(rank, world_size),
    )


def _bound(config: RunConfig, leaves: Sequence[DatasetSplit], *, ranks: int) -> Bound:
    samples = sum(map(count_samples, leaves)) // ranks
    return Bound(fraction=config.dataset.max_bad_fraction, samples=samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPacks:
    """Packs that are read once and kept."""

    packs: list[PackedBatch]
    tally: RejectCounts
    """Of the samples that were read for them."""
    refused: tuple[RefusedSample, ...] = ()


def build_val_packs(config: RunConfig, *, indices: Sequence[int]) -> ValidationPacks:
    """Packs `indices` of the fixed list of validation packs, which starts over at its end.

    Raises:
        DataError: as `build_val_loader`.
    """
    wanted, found = set(indices), {}
    count = 0
    loader = build_val_loader(config, rank=0, world_size=1)
    for index, pack in zip(range(max(indices, default=-1) + 1), loader, strict=False):
        count = index + 1
        if index in wanted:
            found[index] = pack
    loader.close()
    if wanted <= found.keys():
        return ValidationPacks(
            packs=[found[index] for index in indices],
            tally=loader.tally(),
            refused=loader.take_refused(),
        )
    return build_val_packs(config, indices=[index % count for index in indices])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """How far a loader has come."""

    packs: int
    tallies: tuple[RejectCounts, ...]
    readers: Snapshot


class PackLoader:
    """Iterator over PackedBatches with a state that can be saved.

    Take packs with `next()`. Training packs never end; a finite loader starts over at `iter()`.
    """

    def __init__(
        self,
        opener: Callable[[], ResumableLoader],
        *,
        identity: dict[str, Any],
        bound: Bound,
        endless: bool,
        share: tuple[int, int] = (0, 1),
        places: str = "",
    ):
        """`share` is (first, step) of the packs that are given.

        `places` names the dataset in messages.
        """
        self._opener = opener
        self._identity = identity
        self._bound = bound
        self._endless = endless
        self._share = share
        self._refused: deque[RefusedSample] = deque()  # which the thread of `ahead` fills
        self._places = places
        self.moved = ""
        """What `load_state_dict` did about another number of ranks or workers, for the log."""
        self._begin()

    def __iter__(self) -> Self:
        if not self._endless and self._packs is not None:
            self.close()
            self._begin()
        return self

    def __next__(self) -> PackedBatch:
        if self._error is not None:
            raise self._error
        if self._packs is None:
            self._packs = itertools.islice(self._receive(), self._share[0], None, self._share[1])
        return next(self._packs)

    def ahead(self, count: int) -> Iterator[PackedBatch]:
        """The next `count` packs, to be taken by another thread.

        Until `catch_up` the position and all counts stay as they are now: a run that is saved in
        between, and goes on from there, takes them again. Needs workers, which remember where they
        have been.
        """
        assert self._start.workers, "without workers there is one position, that of the reader"
        self._held = self._place()
        return itertools.islice(self, count)

    def catch_up(self) -> None:
        """Counts what was taken ahead, all of it."""
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's data stand, as plain values and bytes.

        Raises:
            DataError: a loader process has died, so its position is lost.
        """
        assert self._endless, "validation starts over and has no position"
        if self._error is not None and self._held is None:
            raise self._error
        if self._packs is None:
            return self._start.plain()  # Energon would wait for ever for workers not yet running
        place = self._held or self._place()
        now = replace(
            self._start,
            readers=pickled(self._loader.freeze(place.readers)),
            packs=place.packs,
            tallies=[asdict(tally) for tally in place.tallies],
        )
        return now.plain()

    def fits(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether `states` belong to these data and settings.

        Raises:
            DataError: they cannot be read.
        """
        return all(LoaderState.of(state).identity == self._start.identity for state in states)

    def load_state_dict(self, states: Sequence[dict[str, Any]], *, places: str = "") -> None:
        """Continues where the ranks that saved `states` stood; all of them, in their order.

        On as many ranks and workers: same packs, same order, buffers included. On others, `moved`
        says what became of them. `places` names the dataset of then in messages.

        Raises:
            DataError: the states belong to other settings (the message names each), or cannot be
                moved to these ranks and workers.
        """
        assert self._packs is None, "restore the loader before its first pack is taken"
        saved = [LoaderState.of(state) for state in states]
        for position in saved:
            both = (places or self._places, self._places)
            check_identity(position.identity, self._start.identity, places=both)
        here = self._start
        moved = reshard(saved, here.layout, rank=here.rank, shares=self._loader.shares())
        self.moved = moved.said
        self._stand_at(moved.position)
        self._loader.thaw(moved.position)

    def counts(self) -> dict[str, int]:
        """Samples refused so far on this rank, by reason.

        They belong to the packs given: what workers read ahead is not in them yet. A resumed run
        goes on from the saved counts and counts no sample twice.
        """
        return dict(sorted(self.tally().refused.items()))

    def tally(self) -> RejectCounts:
        """As `counts`, with the samples read, and for each reason the newest sample that had it."""
        return self._sum(self._tallies if self._held is None else self._held.tallies)

    def take_refused(self) -> tuple[RefusedSample, ...]:
        """Samples refused since the last call; a resumed run may meet some again."""
        return tuple(self._refused.popleft() for _ in range(len(self._refused)))

    def close(self) -> None:
        """Ends the loader's processes."""
        self._loader.shutdown()
        self._packs = iter(())

    def _begin(self) -> None:
        self._loader = self._opener()
        self._packs: Iterator[PackedBatch] | None = None
        self._error: Exception | None = None
        self._held: _Place | None = None
        place = self._loader.worker_config
        layout = LoaderLayout(ranks=place.world_size, workers=place.num_workers)
        self._stand_at(LoaderState.start(layout, rank=place.rank, identity=self._identity))

    def _stand_at(self, position: LoaderState) -> None:
        self._start = position
        self._given = position.packs
        self._tallies = [RejectCounts(**tally) for tally in position.tallies]
        self._former = RejectCounts(**position.former)

    def _place(self) -> _Place:
        """Where reading has come, which may be ahead."""
        return _Place(packs=self._given, tallies=tuple(self._tallies), readers=self._loader.mark())

    def _sum(self, tallies: Iterable[RejectCounts]) -> RejectCounts:
        return sum_counts([*tallies, self._former])

    def _receive(self) -> Iterator[PackedBatch]:
        given = False
        try:
            for delivery in self._loader:
                self._judge(delivery)
                if delivery.pack is not None:
                    given = True
                    self._given += 1
                    yield delivery.pack
            if not given:
                raise DataError("no usable sample in the whole split" + self._report())
        except DataError as error:
            self._fail(error)
            raise
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            death = DataError(worker_died(str(error).strip()))
            self._fail(death)
            raise death from error

    def _judge(self, delivery: WorkerBatch) -> None:
        """Keeps the counts, and ends the run when an error or too many refusals came with them."""
        self._tallies[delivery.worker] = delivery.tally
        self._refused += delivery.refused[: MOST_NAMED - len(self._refused)]
        if delivery.error:
            raise DataError(delivery.error + self._report())
        try:
            self._bound.check(self._sum(self._tallies))
        except DataError as error:
            raise DataError(f"{error}{self._report()}") from None

    def _report(self) -> str:
        total = self._sum(self._tallies)
        return f". Of {total.read} samples read were refused:" + (total.report() or " none")

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._held is None:  # else a save may still ask the workers where they were
            self._loader.shutdown()
