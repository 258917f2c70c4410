"""What can be known of the data before the first step: shards, indices, and what the card says.

Once for all processes: a thousand ranks that look for ten thousand files are a load on any file
system.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.energon.epathlib import EPath

from dit.config import RunConfig
from dit.data.data_card import CARD, card_faults, read_data_card
from dit.data.datasets import DatasetSplit, count_samples, shards_of, train_leaves, val_leaves
from dit.data.rejections import DataError
from dit.data.tar.file_cache import REINDEX, index_fault

_SIDE_BY_SIDE = 16  # files; a network drive answers each after a millisecond or more
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Data without a fault that shows from outside."""

    samples: int
    shards: int

    def __str__(self) -> str:
        shards = "1 shard" if self.shards == 1 else f"{self.shards:,} shards"
        return f"{self.samples:,} training samples in {shards}, none missing"


def check_data(config: RunConfig) -> Checked:
    """Looks at all that a run will read, as far as that goes without reading a sample.

    Raises:
        DataError: a folder, shard or index is missing or damaged, or the data are not made for
            such a model; with every fault that was found, up to a few of a kind.
    """
    leaves, faults = train_leaves(config), []
    for leaf in dict.fromkeys([*leaves, *_validated(config)]):
        if card := read_data_card(leaf):
            faults += [f"{leaf.path / CARD}: {fault}" for fault in card_faults(card, config)]
        faults += _shard_faults(leaf)
    if faults:
        raise DataError("\n  ".join([_head(len(faults)), *faults[:_SHOWN]]))
    counts = [count_samples(leaf) for leaf in leaves]
    return Checked(samples=sum(counts), shards=sum(len(shards_of(leaf)) for leaf in leaves))


def data_line(config: RunConfig) -> str:
    """What a dry run says of the data, as a comment; empty for mock data and for none.

    A folder that is not there is no fault: often another machine trains.

    Raises:
        DataError: as `check_data`.
    """
    data = config.dataset
    paths = [entry.path for entry in data.blend] or ([data.path] if data.path else [])
    if data.mock or not paths:
        return ""
    absent = [path for path in paths if not EPath(path).is_dir() and not EPath(path).is_file()]
    said = f"NOT CHECKED: {absent[0]} does not exist here" if absent else str(check_data(config))
    return f"# {'shards':<14}{said}\n"


def _validated(config: RunConfig) -> Iterator[DatasetSplit]:
    if not (config.train.eval_interval and config.train.eval_iters):
        return
    yield from val_leaves(config)
    for one in config.validation.sets:
        only = replace(
            config.dataset, path=one.path, blend=(), mock=False, use_train_split_for_val=False
        )
        yield from val_leaves(replace(config, dataset=only))


def _shard_faults(leaf: DatasetSplit) -> Iterator[str]:
    """Those of local shards; others show when they are read."""
    local = [
        (shard.path.local_path(), shard.count)
        for shard in shards_of(leaf)
        if shard.path.is_local() and shard.count
    ]
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as threads:
        found = threads.map(lambda one: _shard_fault(*one, folder=str(leaf.path)), local)
        yield from filter(None, found)


def _shard_fault(shard: Path, count: int, *, folder: str) -> str:
    """What is wrong with a shard of `count` samples or its index, empty for nothing."""
    if not shard.is_file():
        return (
            f"{shard} is missing; restore it, or list it under `exclude` in .nv-meta/split.yaml"
            " to go without"
        )
    index, how = Path(f"{shard}.idx"), REINDEX.format(folder=folder)
    try:
        offsets = index.read_bytes()
    except FileNotFoundError:
        return f"{index} is missing; {how}"
    except OSError as error:
        return f"{index} cannot be read ({error.strerror}); {how}"
    if fault := index_fault(offsets):
        return f"{index} is damaged: {fault}; {how}"
    if len(offsets) // 8 != count + 1:
        return (
            f"{index} is of {len(offsets) // 8 - 1} samples, and .nv-meta/.info.json says that the"
            f" shard has {count}; restore the one that is wrong, or pack the data again"
        )
    return ""


def _head(count: int) -> str:
    if count == 1:
        return "the data cannot be trained on:"
    shown = f", of which {_SHOWN} are" if count > _SHOWN else ""
    return f"the data cannot be trained on, for {count} reasons{shown}:"
