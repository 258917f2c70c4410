"""Loader state of each rank in a checkpoint, and the settings of the run to which it belongs.

1. WorkerState        the position of one reader in its samples
2. LoaderState        the position of one rank's loader, with the WorkerStates of its workers
3. loader_identity    the settings that must not change between saving and resuming; Energon would
                      restore most states wrongly, without an error
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import chain
from typing import Any, Self

from megatron.energon.epathlib import EPath
from megatron.energon.state import FlexState

from dit.batch import TEXT
from dit.bin_packing import CANDIDATES
from dit.config import Balance, DatasetConfig, RunConfig
from dit.data.cook import Expected
from dit.data.datasets import META, data_paths, metadataset_files, train_leaves
from dit.data.energon.internals import buffered_keys, nested_states
from dit.data.energon.worker_shards import Remaining, SampleId
from dit.data.rejections import BEGIN_ANEW, DataError, RejectCounts

FORMAT = 4
_CAPPED = 3
"""Format of versions whose packs had at most as many samples as the buffer, and at most 256."""
INPUTS = "inputs of model.family beside the text"
TEXT_COUNTS = "text counts as tokens of a pack"
_MEANT_BEFORE: Mapping[str, Any] = {INPUTS: [], TEXT_COUNTS: False}
"""Name of a setting -> value in states that were saved before the setting existed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """The position of one reader: its last snapshot, and the packs that it has made since."""

    chain: FlexState | None = None
    """State of the reader's chain of datasets at the snapshot; None if it has not begun."""
    made: int = 0
    """Number of packs before the snapshot."""
    since: tuple[tuple[SampleId, ...], ...] = ()
    """Packs returned since the snapshot, each as its samples."""
    left: tuple[Remaining, ...] = ()
    """Samples that a reader without snapshot reads first, one entry for each dataset of a blend."""

    def of_dataset(self, dataset: int) -> FlexState | Remaining:
        """State of this reader's WorkerShard of dataset number `dataset` in the blend.

        If the reader has not begun, it is the samples that it reads before its own.
        """
        if self.chain is not None:
            return [state for state in nested_states(self.chain) if "_left" in state][dataset]
        return self.left[dataset] if self.left else Remaining()

    def waiting(self) -> list[tuple[Any, ...]]:
        """Restore keys of the samples that were read and wait in buffers."""
        return [] if self.chain is None else buffered_keys(self.chain)

    def counts(self) -> RejectCounts:
        """Counts of samples read and refused up to the snapshot."""
        counts = RejectCounts()
        if self.chain is not None:
            counts.restore_state(self.chain["tally"])
        return counts


_FORMER_NAMES = {
    "dit.data.position.ReaderPosition": WorkerState,
    "dit.data.shares.Left": Remaining,
}
"""Class name in pickles of older versions -> its present class."""
_FORMER_DATASETS = {
    "ShardShare": "FolderShard",
    "MockShare": "MockShard",
    "EvenCost": "FlopsBalancedOrder",
    "Deliveries": "WorkerOutput",
}
"""Former class name of a dataset, as older versions saved it -> present name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderLayout:
    """Number of data ranks that read, and of loader processes of each."""

    ranks: int
    workers: int
    """Loader processes of each rank; with 0 the rank itself reads."""

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
    """The position of one data-parallel rank in its data."""

    identity: dict[str, Any]
    """Settings that determine samples and packs, by name."""
    ranks: int
    rank: int
    workers: int
    readers: bytes
    """WorkerStates of all workers, pickled, so that no two loaders share their lists."""
    packs: int = 0
    """Number of packs that these readers have given."""
    dealt: int = 0
    """Number of times that the number of readers has changed."""
    tallies: list[dict[str, Any]]
    """RejectCounts of each worker, as dicts."""
    former: dict[str, Any] = field(default_factory=lambda: asdict(RejectCounts()))
    """RejectCounts, as a dict, of the readers before the last change of their number."""
    format: int = FORMAT
    """Format in which the state is saved."""

    @classmethod
    def start(cls, layout: LoaderLayout, *, rank: int, identity: dict[str, Any]) -> Self:
        """The position of data rank `rank` before its first pack."""
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
        """Index of the worker that gives the next pack."""
        return self.packs % self.layout.readers_per_rank

    @property
    def seed(self) -> tuple[int, int]:
        """The seed of the readers: (`rng.seed`, `dealt`)."""
        return self.identity["rng.seed"], self.dealt

    def unpickled(self) -> list[WorkerState]:
        """The states of the workers, also if an older version pickled them."""
        # Imported here, because only a run that resumes reads pickles.
        from megatron.energon.flavors.webdataset.sample_loader import SliceState

        from dit import safe_pickle

        classes = (WorkerState, Remaining, FlexState, SliceState)
        workers = safe_pickle.loads(self.readers, classes=classes, former_names=_FORMER_NAMES)
        chains = [worker.chain for worker in workers if worker.chain is not None]
        for state in chain.from_iterable(map(nested_states, chains)):
            state["__class__"] = _FORMER_DATASETS.get(state["__class__"], state["__class__"])
        return workers

    @property
    def packs_differ_now(self) -> bool:
        """Whether this version would pack the samples since a snapshot differently."""
        if self.format != _CAPPED:
            return False
        most = min(self.identity["dataset.packing_buffer_size"], CANDIDATES)
        return any(len(pack) >= most for worker in self.unpickled() for pack in worker.since)

    def plain(self) -> dict[str, Any]:
        """The state as plain values, for a file that can be read without running code."""
        return {**asdict(self), "format": FORMAT}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """The loader state with the values that `LoaderState.plain()` returned.

        Raises:
            DataError: another version of the program has written it, or it is damaged.
        """
        found = plain.get("format", 1)
        if found not in (_CAPPED, FORMAT):
            raise DataError(
                f"the loader state of the checkpoint has format {found}, but this version reads"
                f" format {FORMAT}; resume with the version that saved it, or {BEGIN_ANEW}"
            )
        _check_types(plain)
        values = dict(plain)
        values["identity"] = {**_MEANT_BEFORE, **plain["identity"]}
        return cls(**values)


_TYPES: dict[str, type] = {
    "identity": dict,
    "readers": bytes,
    "tallies": list,
    "former": dict,
    **dict.fromkeys(("ranks", "rank", "workers", "packs", "dealt", "format"), int),
}


def _check_types(plain: dict[str, Any]) -> None:
    """Raises DataError if a field of `plain` is missing, unknown or of a wrong type."""
    wrong = sorted(str(name) for name in plain.keys() ^ _TYPES.keys())
    wrong += [n for n, kind in _TYPES.items() if n not in wrong and type(plain[n]) is not kind]
    if not wrong:
        try:
            for counts in (*plain["tallies"], plain["former"]):
                RejectCounts(**counts)
        except TypeError:
            wrong = ["tallies"]
    if not wrong and (plain["ranks"] < 1 or not 0 <= plain["rank"] < plain["ranks"]):
        wrong = ["rank"]
    if wrong:
        raise DataError(
            f"the loader state of the checkpoint is damaged (wrong: {', '.join(wrong)}); resume"
            f" from another checkpoint, or {BEGIN_ANEW}"
        )


def pickled(readers: Sequence[WorkerState]) -> bytes:
    return pickle.dumps(list(readers))


def loader_identity(config: RunConfig) -> dict[str, Any]:
    """Settings that determine which packs the training loaders of all ranks return, by name.

    The folder of the data is not among them, because a copy elsewhere serves as well; nor are ranks
    and workers, which may change (reshard.py).
    """
    data, expected = config.dataset, Expected.of_training(config)
    balanced = data.balance is not Balance.NONE
    return {
        "dataset": _fingerprints(config),
        "weights of dataset.blend": [entry.weight for entry in data.blend],
        "dataset.mock_samples": [asdict(g) for g in data.mock_samples] if data.mock else [],
        "dataset.task_encoder_seq_length": data.task_encoder_seq_length,
        "dataset.packing_buffer_size": data.packing_buffer_size,
        "order of packing": "a full pack with the oldest sample",
        "dataset.balance": str(data.balance),
        "dataset.balance_packs": data.balance_packs if balanced else 0,
        "model sizes, which decide the cost of a pack": config.model.cost_sizes if balanced else [],
        "dataset.sample_multiple": data.sample_multiple,
        "dataset.shuffle_buffer_size": data.shuffle_buffer_size,
        "dataset.max_samples_per_sequence": data.max_samples_per_sequence,
        "rng.seed": config.rng.seed,
        "model.patch_temporal, patch_spatial": list(expected.layout.patch[:2]),
        "model.in_channels": expected.channels,
        "model.crossattn_emb_size": expected.text_width,
        "model.max_size of learnable positions": list(expected.table or ()),
        INPUTS: [
            [one.name, str(one.kind), one.width, one.required, one.may_be_empty, one.clean]
            for one in expected.layout.inputs
            if one.name != TEXT
        ],
        TEXT_COUNTS: expected.layout.counts_text,
        "megatron-energon": version("megatron-energon"),
    }


def check_identity(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, places: tuple[str, str]
) -> None:
    """Checks that a `saved` loader state belongs to the `current` settings.

    `places` are the paths of (the saved run's data, the present data), for messages.

    Raises:
        DataError: names every setting that differs, with both values.
    """
    names = dict.fromkeys([*saved, *current])
    differing = [
        "\n  " + _differing(name, saved.get(name), current.get(name), places)
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
        return f"{name}: {saved} when saved, {current} now"
    then, now = places
    if then == now:
        which = f"index {saved} when saved, {current} now"
        what = f"{now} has other shards, splits or weights now ({which})"
    else:
        what = f"{then} (index {saved}) when saved, {now} (index {current}) now"
    return f"dataset.path, blend, mock: {what}"


def places_of(data: DatasetConfig) -> str:
    """The paths of the dataset `data` for messages, or `mock data`."""
    if data.mock:
        return "mock data"
    return ", ".join(entry.path for entry in data.blend) or str(data.path)


def _fingerprints(config: RunConfig) -> list[str]:
    """Hashes of each dataset folder's index, splits and settings, and of metadataset files."""
    hashes = [
        _hash_files([leaf.path / META / name for name in _INDEX])
        for leaf in train_leaves(config.dataset)
    ]
    for path in map(EPath, [] if config.dataset.mock else data_paths(config.dataset)):
        if path.is_file():
            hashes += [_hash_files([file]) for file in metadataset_files(path)]
    return hashes


_INDEX = (".info.json", ".info.yaml", "split.yaml", "split.json", "dataset.yaml")


def _hash_files(paths: list[EPath]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
