"""Loaders of a run, which yield PackedBatches, with a state that can be saved.

1. check      folders, splits and sizes, before any process starts
2. open       Energon's chain of datasets (energon/task_encoder.py), in the loader workers
3. receive    packs with counts; too many refused samples, or a dead worker, end the run

Order. A reader is one loader worker of one data rank; shards are divided among readers. Each reader
repeats its shards without end, shuffled anew in every pass, blended by weight, through a shuffle
buffer. A pack takes the oldest buffered sample and those that fill it best, so no sample waits for
ever. With an equal number of readers every layout has the same global batches.

Refusals. A sample is never cut: if it is damaged, or longer than a pack, it is refused, counted,
and listed with the reason in refused_samples.jsonl; too many end the run. The rest of a pack stays
empty (`pack_fill`).

Resume. With the same number of readers the next batch is the same bit for bit, shuffle buffers
included. With another number the remaining samples are divided anew: each still comes once in a
pass, in another order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from dit.batch import PackedBatch
from dit.config import DatasetConfig, RunConfig
from dit.data.datasets import DatasetSplit, count_samples, train_leaves, val_leaves
from dit.data.energon.resumable_loader import ResumableLoader, Snapshot, deaths_in_words
from dit.data.energon.stages import WorkerBatch
from dit.data.energon.task_encoder import open_training
from dit.data.energon.validation_groups import ValidationGroups, ValidationPacks
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
from dit.models.pass_work import PassWork


def build_train_loader(
    config: RunConfig, *, rank: int, world_size: int, work: PassWork | None = None
) -> PackLoader:
    """Endless shuffled packs of one data-parallel rank.

    Layouts with an equal product `world_size` x `dataset.num_workers` have equal global batches.
    `work` computes the cost of packs; without it, `dataset.balance` must be none.

    Raises:
        DataError: the data are missing, not prepared, or too few for the readers.
    """
    leaves = train_leaves(config.dataset)
    bound = _bound(config.dataset, leaves, ranks=world_size)
    return PackLoader(
        open_training(config, leaves, bound, rank=rank, world_size=world_size, work=work),
        identity=loader_identity(config),
        bound=bound,
        places=places_of(config.dataset),
    )


def validation_groups(config: RunConfig, *, work: PassWork | None = None) -> ValidationGroups:
    """Groups of validation samples that share a pack, from the splits that validation reads.

    `work` is as in `build_train_loader`.

    Raises:
        DataError: there is no `val` split (the message says what to do), or the data are missing or
            not prepared.
    """
    leaves = val_leaves(config.dataset)
    return ValidationGroups(config, leaves, _bound(config.dataset, leaves, ranks=1), work)


def build_val_packs(
    config: RunConfig, *, indices: Sequence[int], work: PassWork | None = None
) -> ValidationPacks:
    """The validation packs at `indices` of their fixed list, which begins again after its end.

    A pack whose samples are all refused is left out. `work` is as in `build_train_loader`.

    Raises:
        DataError: there is no `val` split, the data are missing or not prepared, or too many
            samples are refused.
    """
    groups = validation_groups(config, work=work)
    plan = groups.plan(max(indices, default=-1) + 1)
    return plan.packs(list(groups.read(plan.of(indices))), late=groups.late)


def _bound(dataset: DatasetConfig, leaves: Sequence[DatasetSplit], *, ranks: int) -> Bound:
    samples = sum(map(count_samples, leaves)) // ranks
    return Bound(fraction=dataset.max_bad_fraction, samples=samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Position:
    """The position of a loader: packs returned, refusals, and the readers' snapshot."""

    packs: int
    counts: tuple[RejectCounts, ...]
    readers: Snapshot


class PackLoader:
    """Endless iterator over PackedBatches with a state that can be saved."""

    def __init__(
        self,
        loader: ResumableLoader,
        *,
        identity: dict[str, Any],
        bound: Bound,
        places: str,
    ):
        """Creates a loader that stands before its first pack.

        `identity` has the settings that a state must share to be loaded, `bound` limits the number
        of refused samples, and `places` names the dataset in messages.
        """
        self._loader = loader
        self._bound = bound
        self._refused: deque[RefusedSample] = deque()  # the thread of `ahead` fills it
        self._places = places
        self.resharded = ""
        """Log line on what `load_state_dict` did, if the number of ranks or workers changed; else
        empty."""
        self._packs: Iterator[PackedBatch] | None = None
        self._error: Exception | None = None
        self._held: _Position | None = None
        workers = loader.worker_config
        layout = LoaderLayout(ranks=workers.world_size, workers=workers.num_workers)
        self._set_state(LoaderState.start(layout, rank=workers.rank, identity=identity))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        if self._error is not None:
            raise self._error
        if self._packs is None:
            self._packs = self._receive()
        return next(self._packs)

    def ahead(self, count: int) -> Iterator[PackedBatch]:
        """Iterator over the next `count` packs, for a background thread.

        Position and counts do not change until `catch_up`: if the run is saved before that and
        resumes, it gets these packs again. This needs workers, because they remember their former
        positions.
        """
        assert self._start.workers, "without workers only the present position is known"
        self._held = self._position()
        return itertools.islice(self, count)

    def catch_up(self) -> None:
        """Counts all packs of `ahead` as taken."""
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """The position in this rank's data, as plain values and bytes.

        Raises:
            DataError: a loader process has died, so its position is lost.
        """
        if self._error is not None and self._held is None:
            raise self._error
        if self._packs is None:
            return self._start.plain()  # Energon would wait for ever for workers not yet running
        at = self._held or self._position()
        now = replace(
            self._start,
            readers=pickled(self._loader.state_dict(at.readers)),
            packs=at.packs,
            tallies=[asdict(counts) for counts in at.counts],
        )
        return now.plain()

    def fits(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether `states` belong to the data and settings of this loader."""
        return all(LoaderState.of(state).identity == self._start.identity for state in states)

    def load_state_dict(self, states: Sequence[dict[str, Any]], *, places: str = "") -> None:
        """Continues from the `states` that all ranks have saved, in the order of ranks.

        It must be called before the first pack. With the same numbers of ranks and workers the
        packs and their order are unchanged. Otherwise `resharded` says what was done. `places`
        names the dataset of the saved states in messages.

        Raises:
            DataError: the states belong to other settings (the message names each), or cannot be
                divided among these ranks and workers.
        """
        from dit.data.reshard import reshard  # only a run that resumes needs it

        assert self._packs is None, "restore the loader before its first pack is taken"
        saved = [LoaderState.of(state) for state in states]
        for state in saved:
            both = (places or self._places, self._places)
            check_identity(state.identity, self._start.identity, places=both)
        here = self._start
        found = reshard(saved, here.layout, rank=here.rank, shards=self._loader.shards())
        self.resharded = found.said
        self._set_state(found.state)
        self._loader.load_state_dict(found.state)

    def counts(self) -> dict[str, int]:
        """Reason -> number of samples refused so far on this rank.

        Only samples of returned packs count, not those that workers have read ahead. A resumed run
        continues from the saved counts and counts no sample twice.
        """
        return dict(sorted(self.reject_counts().refused.items()))

    def reject_counts(self) -> RejectCounts:
        """All counts: samples read, samples refused by reason, and the newest of each reason."""
        return self._sum(self._counts if self._held is None else self._held.counts)

    def take_refused(self) -> tuple[RefusedSample, ...]:
        """Takes the samples refused since the last call, at most MOST_NAMED of them.

        A resumed run may report some again.
        """
        return tuple(self._refused.popleft() for _ in range(len(self._refused)))

    def close(self) -> None:
        """Ends the loader's processes."""
        self._loader.shutdown()
        self._packs = iter(())

    def _set_state(self, state: LoaderState) -> None:
        self._start = state
        self._given = state.packs
        self._counts = [RejectCounts(**counts) for counts in state.tallies]
        self._former = RejectCounts(**state.former)

    def _position(self) -> _Position:
        """The position of reading, which may be ahead of the packs that training has taken."""
        readers = self._loader.snapshot()
        return _Position(packs=self._given, counts=tuple(self._counts), readers=readers)

    def _sum(self, counts: Iterable[RejectCounts]) -> RejectCounts:
        return sum_counts([*counts, self._former])

    def _receive(self) -> Iterator[PackedBatch]:
        try:
            with deaths_in_words():
                for batch in self._loader:
                    self._judge(batch)
                    if batch.pack is not None:
                        self._given += 1
                        yield batch.pack
        except DataError as error:
            self._fail(error)
            raise

    def _judge(self, batch: WorkerBatch) -> None:
        """Takes over the counts and the refused samples of `batch`.

        Raises:
            DataError: `batch` has an error, or too many samples are refused.
        """
        self._counts[batch.worker] = batch.counts
        self._refused += batch.refused[: MOST_NAMED - len(self._refused)]
        total = self._sum(self._counts)
        with total.reported():
            if batch.error:
                raise DataError(batch.error)
            self._bound.check(total)

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._held is None:  # else a save may still ask the workers for a former position
            self._loader.shutdown()
