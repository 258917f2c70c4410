"""Converts the loader states of a checkpoint to another number of ranks or workers.

1. equal number of readers    each continues on the rank that now trains its packs
2. more or fewer readers      the rest of their passes is divided anew; then a new pass begins.
                              The same happens if the version that saved the state packed samples
                              differently
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dit.data.energon.worker_shards import IndexRange, Remaining, WorkerShard, sample_id
from dit.data.loader_state import LoaderLayout, LoaderState, WorkerState, pickled
from dit.data.rejections import BEGIN_ANEW, DataError, RejectCounts, sum_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharded:
    """The loader state for the present ranks and workers, with a note on what changed."""

    state: LoaderState
    said: str
    """Log line on what was done; empty if nothing has changed."""


def reshard(
    saved: Sequence[LoaderState], layout: LoaderLayout, *, rank: int, shards: Sequence[WorkerShard]
) -> Resharded:
    """The loader state with which `rank` continues.

    `saved` has the states of all ranks that saved, in the order of ranks. `shards` has the
    WorkerShard of each dataset of this rank; it is empty if the datasets are not read in separate
    passes.

    Raises:
        DataError: the states are not of one step, or cannot be divided anew.
    """
    then = saved[0].layout
    _check_one_step(saved)
    others = any(state.packs_differ_now for state in saved)
    if then == layout and not others:
        return Resharded(state=saved[rank], said="")
    change = f"data: {then} when saved, {layout.ranks} x {layout.workers} now"
    if others:
        change += ", and packs hold more of such short samples than in the version that saved"
    by_rank = [state.unpickled() for state in saved]
    readers = [by_rank[n % then.ranks][n // then.ranks] for n in range(then.readers)]
    if then.readers == layout.readers and not others:
        said = f"{change}: the same {then.readers} readers go on, global batches are as before"
        return Resharded(state=_same_readers(saved, readers, layout, rank=rank), said=said)
    if not shards:
        how = "resume with that" if others else f"choose sizes whose product is {then.readers}"
        raise DataError(
            f"{change}: a metadataset with blend_epochized or shuffle_over_epochs_multiplier can"
            f" continue only with as many readers; {how}, or {BEGIN_ANEW}"
        )
    rng = np.random.default_rng(saved[0].seed)  # the same on every rank
    pools = [_pool(shard, number, readers, rng) for number, shard in enumerate(shards)]
    said = (
        f"{change}: the {sum(pool.size for pool in pools)} samples that were left of the pass are"
        f" divided among the {layout.readers} readers of now; none is left out or repeated"
    )
    if behind := sum(pool.behind for pool in pools):
        said += f"; {behind} readers were several passes behind the foremost and catch up only one"
    state = _other_readers(saved, readers, layout, rank=rank, pools=pools)
    return Resharded(state=state, said=said)


def packs_of_worker(given: int, *, rank: int, ranks: int) -> int:
    """How many of a run's first `given` packs belong to `rank`."""
    return -((rank - given) // ranks)


def _check_one_step(saved: Sequence[LoaderState]) -> None:
    found, ranks = [state.rank for state in saved], saved[0].ranks
    one = {(state.layout, state.dealt) for state in saved}
    if found != list(range(ranks)) or len(one) > 1:
        raise DataError(
            f"the checkpoint has loader states of data-parallel ranks {found}, not of one run on"
            f" {ranks}; resume from another checkpoint, or {BEGIN_ANEW}"
        )
    counts = [state.packs for state in saved]
    if counts != [packs_of_worker(sum(counts), rank=rank, ranks=ranks) for rank in range(ranks)]:
        raise DataError(
            f"the data-parallel ranks of the checkpoint had given {counts} packs: their loader"
            f" states are not of one step; resume from another checkpoint, or {BEGIN_ANEW}"
        )


def _same_readers(
    saved: Sequence[LoaderState], readers: Sequence[WorkerState], layout: LoaderLayout, *, rank: int
) -> LoaderState:
    ranks = len(saved)
    own = range(rank, layout.readers, layout.ranks)
    given = sum(state.packs for state in saved)
    return LoaderState(
        identity=saved[0].identity,
        ranks=layout.ranks,
        rank=rank,
        workers=layout.workers,
        readers=pickled([readers[n] for n in own]),
        packs=packs_of_worker(given, rank=rank, ranks=layout.ranks),
        dealt=saved[0].dealt,
        tallies=[saved[n % ranks].tallies[n // ranks] for n in own],
        former=asdict(_former(saved, layout, rank=rank)),
    )


def _former(saved: Sequence[LoaderState], layout: LoaderLayout, *, rank: int) -> RejectCounts:
    return sum_counts(RejectCounts(**state.former) for state in saved[rank :: layout.ranks])


def _other_readers(
    saved: Sequence[LoaderState],
    readers: Sequence[WorkerState],
    layout: LoaderLayout,
    *,
    rank: int,
    pools: Sequence[_Pool],
) -> LoaderState:
    own = range(rank, layout.readers, layout.ranks)
    left = [tuple(pool.part(n, layout.readers) for pool in pools) for n in own]
    ended = [_counted(reader) for reader in readers[rank :: layout.ranks]]
    return LoaderState(
        identity=saved[0].identity,
        ranks=layout.ranks,
        rank=rank,
        workers=layout.workers,
        readers=pickled([WorkerState(left=one) for one in left]),
        dealt=saved[0].dealt + 1,
        tallies=[asdict(RejectCounts()) for _ in own],
        former=asdict(sum_counts([_former(saved, layout, rank=rank), *ended])),
    )


def _counted(reader: WorkerState) -> RejectCounts:
    """Counts of the samples that `reader` has packed or refused.

    Samples in its buffers are left out, because other readers will count them again.
    """
    counts = reader.counts()
    counts.read += sum(map(len, reader.since)) - len(reader.waiting())
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    """Samples of a dataset that are still to be read after resharding."""

    runs: list[np.ndarray]
    """Arrays [ranges, 2] of start and stop, in reading order. A sample that is to be read twice is
    in two arrays."""
    first: int
    """Index after the last sample that was read."""
    behind: int
    """Number of readers that were two or more passes behind; they catch up only one pass."""

    @property
    def size(self) -> int:
        return sum(int(np.diff(runs).sum()) for runs in self.runs)

    def part(self, reader: int, readers: int) -> Remaining:
        """An equal part of these samples, for reader number `reader` of `readers`."""
        return Remaining(
            runs=tuple(run for runs in self.runs for run in _part(runs, reader, readers)),
            first=self.first,
        )


def _pool(
    shard: WorkerShard, number: int, readers: Sequence[WorkerState], rng: np.random.Generator
) -> _Pool:
    """Samples of dataset `number` to be read after resharding.

    If a sample was read n times fewer than the sample read most often, it is to be read n times.
    """
    states = [reader.of_dataset(number) for reader in readers]
    reads = shard.reads([s if isinstance(s, Remaining) else s["datasets"][0] for s in states])
    since = [s for reader in readers for pack in reader.since for s in pack]
    waiting = [sample_id(key) for reader in readers for key in reader.waiting()]
    given, unread = (
        np.array([index for of, index in ids if of == number], np.int64) - reads.begin
        for ids in (since, waiting)
    )
    # Mock samples that were given after the snapshot may lie behind all that were read before it.
    more = max(0, int(given.max(initial=-1)) + 1 - len(reads.times))
    times, cuts = np.pad(reads.times, (0, more)), np.pad(reads.cuts, (0, more))
    np.add.at(times, given, 1)
    np.subtract.at(times, unread, 1)
    for state in states:
        for start, stop in state.runs if isinstance(state, Remaining) else state["_left"]:
            times[start - reads.begin : stop - reads.begin] -= 1
    owed = times.max(initial=0) - times
    runs = [_ranges(owed >= n, cuts) + reads.begin for n in range(1, owed.max(initial=0) + 1)]
    return _Pool(
        runs=[rng.permutation(one) for one in runs],
        first=reads.begin + len(times),
        behind=reads.behind,
    )


def _ranges(chosen: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """(start, stop) [ranges, 2] of each run of True in `chosen`.

    A run is also cut in two before each sample where `cuts` is True.
    """
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    starts = np.flatnonzero(chosen & (cuts | (edges[:-1] == 1)))
    ends = np.flatnonzero(edges == -1)
    stops = np.minimum(
        np.append(starts[1:], len(chosen)), ends[np.searchsorted(ends, starts, "right")]
    )
    return np.stack([starts, stops], axis=1)


def _part(runs: np.ndarray, reader: int, readers: int) -> Iterator[IndexRange]:
    """Yields the ranges of reader number `reader`.

    All `runs` [ranges, 2] are laid end to end, and each of the `readers` gets an equal part.
    """
    bounds = np.append(0, np.diff(runs).cumsum())
    begin, end = (int(bounds[-1]) * n // readers for n in (reader, reader + 1))
    first, last = np.searchsorted(bounds, begin, "right") - 1, np.searchsorted(bounds, end)
    for (start, stop), before, after in zip(
        runs[first:last].tolist(), bounds[first:last], bounds[first + 1 :], strict=False
    ):
        if max(before, begin) < min(after, end):
            yield start + max(0, begin - int(before)), stop - max(0, int(after) - end)
