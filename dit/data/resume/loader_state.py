"""Where the readers of a run stand: what a checkpoint keeps of each rank's loader."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.state import FlexState

from dit import safe_pickle
from dit.data.energon.worker_shards import Remaining, SampleId
from dit.data.rejections import BEGIN_ANEW, DataError, RejectCounts

FORMAT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """Where one reader stands: a snapshot of it, and the packs to skip from there."""

    chain: FlexState | None = None
    """State of its chain of datasets; None where it has not begun."""
    made: int = 0
    """Packs made before the snapshot."""
    since: tuple[tuple[SampleId, ...], ...] = ()
    """The packs given since the snapshot, by their samples."""
    left: tuple[Remaining, ...] = ()
    """What it reads first, by dataset, where it has not begun."""

    def share(self, dataset: int) -> FlexState | Remaining:
        """Of one dataset of the blend: the state of its link, or what it is to begin with."""
        if self.chain is not None:
            return [state for state in _states(self.chain) if "_left" in state][dataset]
        return self.left[dataset] if self.left else Remaining()

    def waiting(self) -> list[tuple[Any, ...]]:
        """Keys of the samples that have been read and wait in buffers."""
        states = [] if self.chain is None else list(_states(self.chain))
        buffers = [v for state in states for v in state.values() if isinstance(v, dict)]
        keys = [key for buffer in buffers for key in buffer.get("_restore_keys", ())]
        return [key for outer in keys for key in _samples_in(outer)]

    def tally(self) -> RejectCounts:
        """Counts at the snapshot."""
        tally = RejectCounts()
        if self.chain is not None:
            tally.restore_state(self.chain["tally"])
        return tally


_FORMER_NAMES = {
    "dit.data.position.ReaderPosition": WorkerState,
    "dit.data.shares.Left": Remaining,
}
"""What pickles of older versions call the classes."""
_FORMER_DATASETS = {
    "ShardShare": "FolderShard",
    "MockShare": "MockShard",
    "EvenCost": "FlopsBalancedOrder",
    "Deliveries": "WorkerOutput",
}
"""Datasets of Energon's chain, whose class names Energon stores and compares."""


def _with_new_names(chain: FlexState | None) -> None:
    for state in _states(chain) if chain is not None else ():
        name = state["__class__"]
        state["__class__"] = _FORMER_DATASETS.get(name, name)


def _states(state: FlexState) -> Iterator[FlexState]:
    yield state
    for inner in state.get("datasets", ()):
        yield from _states(inner)


def _samples_in(key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Keys of the samples of a group, which its own key holds; or that of a single sample."""
    return [inner for inner in key if isinstance(inner, tuple)] or [key]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderLayout:
    """How many read, and where."""

    ranks: int
    workers: int
    """Loader processes of each rank; without any the rank itself reads."""

    @property
    def readers_per_rank(self) -> int:
        return max(1, self.workers)

    @property
    def readers(self) -> int:
        return self.ranks * self.readers_per_rank

    def __str__(self) -> str:
        return f"data-parallel size {self.ranks} x dataset.num_workers {self.workers}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """Where the loader of one data-parallel rank stands."""

    identity: dict[str, Any]
    """What its samples and packs depend on."""
    ranks: int
    rank: int
    workers: int
    readers: bytes
    """Pickled WorkerStates, by worker. Bytes, because two loaders would share their lists."""
    packs: int = 0
    """Given since these readers began."""
    dealt: int = 0
    """How often the samples have been shared out to another number of readers."""
    tallies: list[dict[str, Any]]
    """Counts of the readers, by worker."""
    former: dict[str, Any] = field(default_factory=lambda: asdict(RejectCounts()))
    """Counts of readers that are no more."""

    @classmethod
    def start(cls, layout: LoaderLayout, *, rank: int, identity: dict[str, Any]) -> Self:
        """Before the first pack."""
        return cls(
            identity=identity,
            ranks=layout.ranks,
            rank=rank,
            workers=layout.workers,
            readers=pickled([WorkerState()] * layout.readers_per_rank),
            tallies=[asdict(RejectCounts())] * layout.readers_per_rank,
        )

    @property
    def layout(self) -> LoaderLayout:
        return LoaderLayout(ranks=self.ranks, workers=self.workers)

    @property
    def next_worker(self) -> int:
        """Whose turn it is."""
        return self.packs % self.layout.readers_per_rank

    @property
    def seed(self) -> tuple[int, int]:
        """Readers that share the samples out anew draw other numbers than those of the start."""
        return self.identity["rng.seed"], self.dealt

    def unpickled(self) -> list[WorkerState]:
        """The states of the workers, those of older versions of the program included."""
        classes = (WorkerState, Remaining, FlexState, SliceState)
        workers = safe_pickle.loads(self.readers, classes=classes, former_names=_FORMER_NAMES)
        for worker in workers:
            _with_new_names(worker.chain)
        return workers

    def plain(self) -> dict[str, Any]:
        """For a file that is read without running code."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """What `plain` gave.

        Raises:
            DataError: another version of the program has written it, or it is damaged.
        """
        found = plain.get("format", 1)
        if found != FORMAT:
            raise DataError(
                f"the loader state of the checkpoint has format {found}, this version reads format"
                f" {FORMAT}; resume with the version that saved it, or {BEGIN_ANEW}"
            )
        _check_types(plain)
        return cls(**{name: value for name, value in plain.items() if name != "format"})


_TYPES: dict[str, type] = {
    "identity": dict,
    "readers": bytes,
    "tallies": list,
    "former": dict,
    **dict.fromkeys(("ranks", "rank", "workers", "packs", "dealt"), int),
}


def _check_types(plain: dict[str, Any]) -> None:
    """Raises DataError where fields are missing, unknown, or of another type."""
    wrong = sorted(str(name) for name in plain.keys() ^ {"format", *_TYPES})
    wrong += [n for n, kind in _TYPES.items() if n not in wrong and type(plain[n]) is not kind]
    if not wrong:
        try:
            for tally in (*plain["tallies"], plain["former"]):
                RejectCounts(**tally)
        except TypeError:
            wrong = ["tallies"]
    if not wrong and (plain["ranks"] < 1 or not 0 <= plain["rank"] < plain["ranks"]):
        wrong = ["rank"]
    if wrong:
        raise DataError(
            f"the loader state of the checkpoint is damaged, in {', '.join(wrong)}; resume from"
            f" another checkpoint, or {BEGIN_ANEW}"
        )


def pickled(readers: Sequence[WorkerState]) -> bytes:
    return pickle.dumps(list(readers))
