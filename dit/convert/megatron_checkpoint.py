"""A checkpoint of ours, read and written one tensor at a time.

Megatron-Core stores the tensors of all layers that share a name as one, the layer its first axis,
in pieces as large as the layout that wrote them. torch's own reader puts any part together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dit.convert.errors import ConvertError, listed
from dit.models.diffusers_names import Pair
from dit.train.checkpoint.paths import damaged

AVERAGED = "ema."
_BESIDE = (AVERAGED, "optimizer.")  # what a checkpoint holds beside the weights of the model


class _Into(DefaultLoadPlanner):
    """Puts whatever is read into one tensor."""

    def __init__(self, whole: Tensor):
        super().__init__()
        self.whole = whole

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.whole
        for axis, (at, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(axis, at, size)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class Stored:
    """The weights of a checkpoint, or their average."""

    def __init__(self, path: Path, *, averaged: bool):
        """Reads the index alone.

        Raises:
            CheckpointError: it is damaged.
        """
        self.path = path
        self.prefix = AVERAGED if averaged else ""
        self._reader = FileSystemReader(path)
        try:
            self._index = self._reader.read_metadata()
        except Exception as error:
            raise damaged(path, error) from error
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)

    @property
    def has_average(self) -> bool:
        return any(name.startswith(AVERAGED) for name in self._index.state_dict_metadata)

    def check(self, wanted: list[Pair]) -> None:
        """That all of `wanted` is here, in its shape, and nothing else beside it.

        Raises:
            ConvertError: lists the names that are missing, left over, or of another shape.
        """
        shapes = {self.prefix + pair.ours: stored_shape(pair) for pair in wanted}
        here = {name: tuple(entry.size) for name, entry in self._tensors().items()}
        problems = []
        if missing := shapes.keys() - here.keys():
            problems.append(f"has no {listed(missing)}")
        if extra := here.keys() - shapes.keys():
            problems.append(f"has, beyond the model of its config.yaml, {listed(extra)}")
        problems += [
            f"has {name} of shape {list(here[name])} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in here and here[name] != shape
        ]
        if problems:
            raise ConvertError(f"{self.path} {'; '.join(problems)}")

    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        """Entries of the weights asked for."""
        return {
            name: entry
            for name, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            and (name.startswith(self.prefix) if self.prefix else not name.startswith(_BESIDE))
        }

    def _entry(self, pair: Pair) -> TensorStorageMetadata:
        entry = self._index.state_dict_metadata[self.prefix + pair.ours]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def dtype(self, pair: Pair) -> torch.dtype:
        return self._entry(pair).properties.dtype

    def read(self, pair: Pair) -> Tensor:
        """One tensor, whole."""
        chunk = _chunk(pair)
        whole = torch.empty(chunk.sizes, dtype=self.dtype(pair))
        name = self.prefix + pair.ours
        items = create_read_items_for_chunk_list(name, self._entry(pair), [chunk])
        held = sum(math.prod(item.lengths) for item in items)
        assert held == whole.numel(), f"{name}: {held} of {whole.numel()} numbers are stored"
        self._reader.read_data(LoadPlan(items), _Into(whole)).wait()
        return whole.view(pair.shape)


def stored_shape(pair: Pair) -> tuple[int, ...]:
    """Shape of all layers together."""
    return pair.shape if pair.layer is None else (pair.layers, *pair.shape)


def _chunk(pair: Pair) -> ChunkStorageMetadata:
    """Where in what is stored the tensor of a layer lies."""
    front = () if pair.layer is None else (pair.layer,)
    return ChunkStorageMetadata(
        offsets=torch.Size([*front, *(0 for _ in pair.shape)]),
        sizes=torch.Size([*(1 for _ in front), *pair.shape]),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to be written, and how it gets there."""

    pair: Pair
    tensor: Tensor


def write_file(file: Path, pieces: Iterable[Piece]) -> list[WriteResult]:
    """One file of a checkpoint, from tensors that are made one after the other."""
    from dit.train.checkpoint.distcp import write_items

    return write_items(file, map(_item, pieces))


def _item(piece: Piece) -> tuple[WriteItem, Tensor]:
    chunk = _chunk(piece.pair)
    tensor = piece.tensor.reshape(chunk.sizes)
    item = WriteItem(
        index=MetadataIndex(piece.pair.ours, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(stored_shape(piece.pair)),
        ),
    )
    return item, tensor


def write_index(
    folder: Path, pairs: list[Pair], dtypes: dict[str, torch.dtype], results: list[WriteResult]
) -> None:
    """Says where everything lies, for torch and for Megatron-Core."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    for pair in pairs:
        chunks.setdefault(pair.ours, []).append(_chunk(pair))
    shapes = {pair.ours: torch.Size(stored_shape(pair)) for pair in pairs}
    tensors = {
        name: TensorStorageMetadata(TensorProperties(dtype=dtypes[name]), shapes[name], places)
        for name, places in chunks.items()
    }
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=dict(tensors)), [results])
    torch.save({}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
