"""A saved position on another number of ranks or workers.

1. as many readers    each goes on where it stood, on the rank whose turn it is
2. more or fewer      what they had left of their passes is dealt out anew; then a new pass begins
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dit.data.energon.worker_shards import Remaining, Run, WorkerShard, sample_id
from dit.data.loader_state import LoaderLayout, LoaderState, WorkerState, pickled
from dit.data.rejections import BEGIN_ANEW, DataError, RejectCounts, sum_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharded:
    """A position on the ranks and workers of now."""

    position: LoaderState
    said: str
    """What was done, for the log; empty where nothing has changed."""


def reshard(
    saved: Sequence[LoaderState], layout: LoaderLayout, *, rank: int, shares: Sequence[WorkerShard]
) -> Resharded:
    """Where `rank` goes on; `saved` are the positions of all ranks of then, in their order.

    `shares` are the links of this rank's chain, one for each dataset; none where passes cannot be
    told apart.

    Raises:
        DataError: the positions are not of one step, or cannot be dealt out anew.
    """
    then = saved[0].layout
    _check_one_step(saved)
    if then == layout:
        return Resharded(position=saved[rank], said="")
    change = f"data: {then} when saved, {layout.ranks} x {layout.workers} now"
    by_rank = [position.unpickled() for position in saved]
    readers = [by_rank[n % then.ranks][n // then.ranks] for n in range(then.readers)]
    if then.readers == layout.readers:
        said = f"{change}: the same {then.readers} readers go on, global batches are as before"
        return Resharded(position=_same(saved, readers, layout, rank=rank), said=said)
    if not shares:
        raise DataError(
            f"{change}: a metadataset with blend_epochized or shuffle_over_epochs_multiplier goes"
            f" on with as many readers only; choose sizes whose product is {then.readers}, or"
            f" {BEGIN_ANEW}"
        )
    rng = np.random.default_rng(saved[0].seed)  # the same on every rank
    pools = [_pool(share, number, readers, rng) for number, share in enumerate(shares)]
    said = (
        f"{change}: the {sum(pool.size for pool in pools)} samples that were left of the pass are"
        f" dealt to the {layout.readers} readers of now, none is left out or repeated"
    )
    if behind := sum(pool.behind for pool in pools):
        said += f"; {behind} readers were several passes behind the foremost and make up for one"
    return Resharded(position=_dealt(saved, readers, layout, rank=rank, pools=pools), said=said)


def packs_of_worker(given: int, *, rank: int, ranks: int) -> int:
    """How many of the first `given` packs of a run are those of one rank."""
    return -((rank - given) // ranks)


def _check_one_step(saved: Sequence[LoaderState]) -> None:
    found, ranks = [position.rank for position in saved], saved[0].ranks
    one = {(position.layout, position.dealt) for position in saved}
    if found != list(range(ranks)) or len(one) > 1:
        raise DataError(
            f"the checkpoint has loader states of data-parallel ranks {found}, not of one run on"
            f" {ranks}; resume from another checkpoint, or {BEGIN_ANEW}"
        )
    counts = [position.packs for position in saved]
    if counts != [packs_of_worker(sum(counts), rank=rank, ranks=ranks) for rank in range(ranks)]:
        raise DataError(
            f"the data-parallel ranks of the checkpoint had given {counts} packs: their loader"
            f" states are not of one step; resume from another checkpoint, or {BEGIN_ANEW}"
        )


def _same(
    saved: Sequence[LoaderState], readers: Sequence[WorkerState], layout: LoaderLayout, *, rank: int
) -> LoaderState:
    ranks = len(saved)
    own = range(rank, layout.readers, layout.ranks)
    given = sum(position.packs for position in saved)
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
    return sum_counts(RejectCounts(**position.former) for position in saved[rank :: layout.ranks])


def _dealt(
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
    """Counts of a reader without those samples that are dealt out again."""
    tally = reader.tally()
    tally.read += sum(map(len, reader.since)) - len(reader.waiting())
    return tally


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    """What all readers together have left of a dataset."""

    runs: list[np.ndarray]
    """[number, 2] start and stop, in the order of reading; what is owed twice is in two of them."""
    first: int
    """Index after the last one that was read."""
    behind: int
    """Readers that will not catch up."""

    @property
    def size(self) -> int:
        return sum(int(np.diff(runs).sum()) for runs in self.runs)

    def part(self, reader: int, readers: int) -> Remaining:
        """As many samples for each of `readers`."""
        return Remaining(
            runs=tuple(run for runs in self.runs for run in _part(runs, reader, readers)),
            first=self.first,
        )


def _pool(
    share: WorkerShard, number: int, readers: Sequence[WorkerState], rng: np.random.Generator
) -> _Pool:
    """A sample is owed as often as it has been given less than those given most."""
    states = [reader.share(number) for reader in readers]
    reads = share.reads([s if isinstance(s, Remaining) else s["datasets"][0] for s in states])
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
    runs = [_runs(owed >= n, cuts) + reads.begin for n in range(1, owed.max(initial=0) + 1)]
    return _Pool(
        runs=[rng.permutation(one) for one in runs],
        first=reads.begin + len(times),
        behind=reads.behind,
    )


def _runs(chosen: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """[number, 2] start and stop of the runs of what is chosen."""
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    starts = np.flatnonzero(chosen & (cuts | (edges[:-1] == 1)))
    ends = np.flatnonzero(edges == -1)
    stops = np.minimum(
        np.append(starts[1:], len(chosen)), ends[np.searchsorted(ends, starts, "right")]
    )
    return np.stack([starts, stops], axis=1)


def _part(runs: np.ndarray, reader: int, readers: int) -> Iterator[Run]:
    """The samples that one of `readers` gets when the runs are laid end to end."""
    bounds = np.append(0, np.diff(runs).cumsum())
    begin, end = (int(bounds[-1]) * n // readers for n in (reader, reader + 1))
    first, last = np.searchsorted(bounds, begin, "right") - 1, np.searchsorted(bounds, end)
    for (start, stop), before, after in zip(
        runs[first:last].tolist(), bounds[first:last], bounds[first + 1 :], strict=False
    ):
        if max(before, begin) < min(after, end):
            yield start + max(0, begin - int(before)), stop - max(0, int(after) - end)
