"""Where the readers of a run stand: what a checkpoint keeps of each rank's loader."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Self

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.state import FlexState

from dit import safe_pickle
from dit.config import Balance, DatasetConfig, ModelConfig, RunConfig
from dit.data.cook import Expected
from dit.data.datasets import META, train_leaves
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


def loader_identity(config: RunConfig) -> dict[str, Any]:
    """What decides which packs the training loaders of all ranks give, as plain values by name.

    The place of the data is not among them: a copy elsewhere resumes as well. Nor are ranks and
    workers, which may change (moving.py).
    """
    data, expected = config.dataset, Expected.of(config)
    even = data.balance is not Balance.NONE
    return {
        "dataset": _fingerprints(config),
        "weights of dataset.blend": [entry.weight for entry in data.blend],
        "dataset.mock_samples": [asdict(g) for g in data.mock_samples] if data.mock else [],
        "dataset.task_encoder_seq_length": data.task_encoder_seq_length,
        "dataset.packing_buffer_size": data.packing_buffer_size,
        "order of packing": "a full pack with the oldest sample",
        "dataset.balance": str(data.balance),
        "dataset.balance_packs": data.balance_packs if even else 0,
        "model sizes, which decide the cost of a pack": _sizes(config.model) if even else [],
        "dataset.sample_multiple": data.sample_multiple,
        "dataset.shuffle_buffer_size": data.shuffle_buffer_size,
        "dataset.max_samples_per_sequence": data.max_samples_per_sequence,
        "rng.seed": config.rng.seed,
        "model.patch_temporal, patch_spatial": list(expected.layout.patch[:2]),
        "model.in_channels": expected.channels,
        "model.crossattn_emb_size": expected.text_width,
        "model.max_size of learnable positions": list(expected.table or ()),
        "megatron-energon": version("megatron-energon"),
    }


def _sizes(model: ModelConfig) -> list[int]:
    return [
        *(model.num_layers, model.hidden_size, model.ffn_hidden_size, model.adaln_lora_dim),
        model.text_pad_to or 0,
    ]


def check_identity(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, places: tuple[str, str]
) -> None:
    """Refuses a loader state of another run; `places` are the datasets of then and of now.

    Raises:
        DataError: names every item that differs, with both values.
    """
    names = dict.fromkeys([*saved, *current])
    differing = [
        f"\n  {name}: {_differing(name, saved.get(name), current.get(name), places)}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if differing:
        raise DataError(
            "the loader state of the checkpoint belongs to other settings:"
            + "".join(differing)
            + f"\nSet them back to resume where the data stopped, or {BEGIN_ANEW}."
        )


def _differing(name: str, saved: Any, current: Any, places: tuple[str, str]) -> str:
    if name != "dataset":
        return f"{saved} when saved, {current} now"
    then, now = places
    if then == now:
        return f"{now} has other shards or splits now (index {saved} when saved, {current} now)"
    return f"{then} (index {saved}) when saved, {now} (index {current}) now"


def places_of(data: DatasetConfig) -> str:
    """The paths of a dataset, for messages."""
    if data.mock:
        return "mock data"
    return ", ".join(entry.path for entry in data.blend) or str(data.path)


def _fingerprints(config: RunConfig) -> list[str]:
    """One hash for each dataset folder, over its index, its splits and its settings."""
    hashes = [
        _hash_files([leaf.path / META / name for name in _INDEX]) for leaf in train_leaves(config)
    ]
    path = config.dataset.path
    if not config.dataset.mock and path is not None and EPath(path).is_file():
        hashes.append(_hash_files([EPath(path)]))
    return hashes


_INDEX = (".info.json", ".info.yaml", "split.yaml", "split.json", "dataset.yaml")


def _hash_files(paths: list[EPath]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
