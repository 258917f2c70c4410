"""The samples of a dataset folder as dicts, by number or one after the other.

1. ShardSamples   reads the outline of every sample at the start, and a whole sample when asked
2. SampleStream   the share of one rank and worker, in an order that epoch and seed decide

A sample is a dict: `key`, `caption`, `fps` (None for a picture), `width` and `height` in pixels,
`about` (all of its `.json`), `latent` [C, F, H, W], `text` [L, E], and what else the shard has of
the names in EXPORTED. Tensors have the types of the shard.
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from dit.batch import TEXT
from dit.data.datasets import DatasetSplit, check_folder, count_samples, shards_of
from dit.data.preflight import read_data_card
from dit.data.records import LATENT, Head, head_length, is_dfm, read_outline, read_record
from dit.data.rejections import DataError, SampleRefused
from dit.data.tar_reader import NotPlain, OpenShards, SampleLocation, sample_members, split_name
from dit.models.family import InputKind
from dit.parsing import parse_json

EXPORTED: Mapping[str, InputKind] = {
    TEXT: InputKind.TEXT,
    "pooled_text": InputKind.VECTOR,
    "text_2": InputKind.TEXT,
    "null_text": InputKind.NULL_TEXT,
    "image_embed": InputKind.TEXT,
    "first_frame_latent": InputKind.FRAMES,
    "condition_latent": InputKind.CHANNELS,
    **{f"reference_latent_{number}": InputKind.REFERENCE for number in range(4)},
}
"""What a sample has beside its latent, by the names in our shards."""
_STRIDE = 8  # pixels along a side of a latent cell, where neither sample nor card say it
_LARGE = 2**17  # more than the head of any tensors has


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SizeBucket:
    """Samples that can be stacked."""

    width: int  # pixels, as encoded
    height: int
    latent: tuple[int, ...]  # C, F, H, W
    names: tuple[str, ...]  # of the tensors beside the latent


class ShardSamples(Dataset[dict[str, Any]]):
    """All samples of one split, by number in the order of the shards.

    Raises:
        DataError: the folder is no dataset, has no such split, or a sample cannot be read; the
            message names its key and shard. Nothing is left out.
    """

    def __init__(self, folder: Path | str, *, split: str = "train"):
        leaf = DatasetSplit(path=EPath(str(folder)), split=split)
        check_folder(leaf.path)
        count = count_samples(leaf)
        self.folder, self.split = Path(folder), split
        self.card = read_data_card(leaf) or {}
        stride = self.card.get("latent", {}).get("stride")
        self._stride = stride if type(stride) is int and stride > 0 else _STRIDE
        shards = shards_of(leaf)
        self._paths = [str(shard.path.local_path()) for shard in shards]
        self._firsts = np.cumsum([0, *(shard.count for shard in shards)])
        self._open = OpenShards()
        self.buckets: list[SizeBucket] = []
        """In the order of their samples."""
        self.bucket_of = np.empty(count, np.int32)
        self.longest_text = 0
        self._read_outlines()

    def __len__(self) -> int:
        return len(self.bucket_of)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = self._place(index)
        try:
            key, parts = _parts(place)
            record, about = read_record(parts, EXPORTED), parse_json(parts["json"])
        except (SampleRefused, NotPlain, OSError, ValueError) as error:
            raise self._unreadable(index, error) from error
        bucket = self.buckets[self.bucket_of[index]]
        return {
            "key": key,
            "caption": record.caption,
            "fps": None if math.isnan(record.fps) else record.fps,
            "width": bucket.width,
            "height": bucket.height,
            "about": about,
            LATENT: record.latent_CFHW,
            **record.inputs,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Without open files, which another process opens again."""
        return self.__dict__ | {"_open": OpenShards()}

    def _read_outlines(self) -> None:
        numbers: dict[SizeBucket, int] = {}
        for index in range(len(self)):
            try:
                _, parts = _parts(self._place(index), whole=False)
                record = (read_record if is_dfm(parts) else read_outline)(parts, EXPORTED)
                about = parse_json(parts["json"])
            except (SampleRefused, NotPlain, OSError, ValueError) as error:
                raise self._unreadable(index, error) from error
            shape = tuple(record.latent_CFHW.shape)
            bucket = SizeBucket(
                width=self._pixels(about, "width", shape[3]),
                height=self._pixels(about, "height", shape[2]),
                latent=shape,
                names=tuple(sorted(record.inputs)),
            )
            self.bucket_of[index] = numbers.setdefault(bucket, len(numbers))
            if record.text_LE is not None:
                self.longest_text = max(self.longest_text, len(record.text_LE))
        self.buckets = list(numbers)

    def _pixels(self, about: Mapping[str, Any], name: str, cells: int) -> int:
        value = about.get(name)
        return value if type(value) is int and value > 0 else cells * self._stride

    def _place(self, index: int) -> SampleLocation:
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        try:
            path = self._paths[shard]
            start, size = self._open.span(path, int(index - self._firsts[shard]))
        except (OSError, ValueError) as error:
            raise self._unreadable(index, error) from error
        return SampleLocation(shards=self._open, path=path, start=start, size=size)

    def _unreadable(self, index: int, error: Exception) -> DataError:
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return DataError(
            f"{self._paths[shard]}, sample {index - self._firsts[shard]}: {error};"
            f" `python -m data_prep inspect {self.folder}` lists what is damaged, and other"
            " trainers need every sample: restore the shard or pack the data again"
        )


def _parts(place: SampleLocation, *, whole: bool = True) -> tuple[str, dict[str, Any]]:
    """Key and parts of a record; unless `whole`, the Head of its `.safetensors` alone.

    Raises:
        NotPlain: its tar has unusual headers.
        OSError: it cannot be read.
    """
    parts, key = dict[str, Any](), ""
    for name, at, size in sample_members(place.read, place.size):
        key, extension = split_name(name)
        if whole or extension != "safetensors":
            parts[extension] = place.read(at, size)
        else:
            length = head_length(place.read(at, min(8, size)))
            parts[extension] = Head(data=place.read(at, min(length, size, _LARGE)), size=size)
    return key, parts


class SampleStream(IterableDataset[dict[str, Any]]):
    """The samples of one rank, one after the other; workers of a DataLoader share them.

    Every rank has as many: a few samples come twice where ranks do not divide them. The state is
    how many samples this process has given, so that torchdata's StatefulDataLoader, or a loop over
    the stream itself, goes on with the next one. A plain DataLoader with workers cannot ask its
    workers: use `BucketLoader`.
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
        self.samples = ShardSamples(folder, split=split)
        self._rank, self._world, self._shuffle, self._seed = dp_rank, dp_world_size, shuffle, seed
        self.epoch, self._given, self._first = 0, 0, 0

    def __len__(self) -> int:
        return -(-len(self.samples) // self._world)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass, which begins anew unless it is the same epoch."""
        if epoch != self.epoch:
            self.epoch, self._given, self._first = epoch, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        first, self._first = self._first, 0
        mine = self._order()[number::count]
        self._given = first
        for index in mine[first:]:
            self._given += 1
            yield self.samples[index]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "samples": self._given, "order": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the samples of `state`.

        Raises:
            ValueError: it is of another order of samples.
        """
        check_same_order(state["order"], self._identity)
        self.epoch, self._given = state["epoch"], state["samples"]
        self._first = self._given

    @property
    def _identity(self) -> dict[str, Any]:
        """All that decides the order, but the epoch."""
        return {
            "samples": len(self.samples),
            "dp_world_size": self._world,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _order(self) -> list[int]:
        every = np.arange(len(self.samples))
        if self._shuffle:
            every = np.random.default_rng((self._seed, self.epoch)).permutation(every)
        return share_of(every, rank=self._rank, world=self._world).tolist()


def share_of(members: np.ndarray, *, rank: int, world: int) -> np.ndarray:
    """Every `world`-th, from `rank`, of members that repeat until ranks divide them."""
    return np.resize(members, -(-len(members) // world) * world)[rank::world]


def check_rank(rank: int, world: int) -> None:
    """Raises ValueError where there is no such rank."""
    if not 0 <= rank < world:
        raise ValueError(f"dp_rank={rank} must lie in 0 to {world - 1}: dp_world_size={world}")


def check_same_order(stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ValueError where a state belongs to another order of samples."""
    if changes := [f"{n}={stored.get(n)!r} -> {own[n]!r}" for n in own if stored.get(n) != own[n]]:
        raise ValueError(
            f"this state is of another order of samples ({', '.join(changes)}), so that going on"
            " would repeat some and leave out others; give the values of the stopped run, or begin"
            " an epoch without the state"
        )
