"""This project's checkpoints, read and written one tensor at a time.

Megatron-Core stores the tensors of all layers under one name, stacked along a first axis, in chunks
that depend on the layout that wrote them. torch's reader assembles any slice of such a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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

from dit.checkpoint_paths import damaged, saved_config
from dit.convert.errors import ConvertError, check_shapes
from dit.distcp import write_format, write_items
from dit.models.diffusers.names import Pair
from dit.models.parameter_groups import NOTHING_FROZEN, frozen_weights, own_name

AVERAGED = "ema."
_BESIDE = (AVERAGED, "optimizer.")  # prefixes of what a checkpoint holds beside the weights
_CRITIC = "critic."  # prefix of all that belongs to the critic of a distillation


class _TensorPlanner(DefaultLoadPlanner):
    """Load planner that copies all chunks it reads into one tensor."""

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


class StoredWeights:
    """The weights in a checkpoint, or their EMA, which are read one by one."""

    def __init__(self, path: Path, *, averaged: bool, critic: bool = False):
        """Opens the checkpoint `path` without reading weights.

        With `averaged`, the weights are averages (EMA); config.yaml then says which weights are
        frozen and have none. With `critic`, they are those of the critic of a distillation.

        Raises:
            CheckpointError: the index is damaged.
            ConvertError: there is no critic.
        """
        self.path = path
        self.network = _CRITIC if critic else ""
        self.prefix = self.network + (AVERAGED if averaged else "")
        self._frozen = frozen_weights(saved_config(path)) if averaged else NOTHING_FROZEN
        self._reader = FileSystemReader(path)
        try:
            self._index = self._reader.read_metadata()
        except Exception as error:
            raise damaged(path, error) from error
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)
        if not self._tensors() and critic:
            raise ConvertError(
                f"{path} holds no critic, which only runs with distill.method=dmd save; leave"
                " --critic out"
            )

    @property
    def has_average(self) -> bool:
        begins = self.network + AVERAGED
        return any(name.startswith(begins) for name in self._index.state_dict_metadata)

    def check(self, wanted: list[Pair]) -> None:
        """Checks that exactly the tensors of `wanted` are stored, with their shapes.

        Raises:
            ConvertError: lists the names that are missing, unexpected, or of another shape.
        """
        shapes = {
            self._name(pair): pair.shape if self._is_apart(pair) else stored_shape(pair)
            for pair in wanted
        }
        every = self._index.state_dict_metadata.items()
        stored = {n: one for n, one in every if isinstance(one, TensorStorageMetadata)}
        here = {name: tuple(entry.size) for name, entry in stored.items()}
        extra = self._tensors().keys() - shapes.keys()
        beyond = "the model of its config.yaml"
        check_shapes(here, shapes, extra=extra, place=self.path, beyond=beyond)

    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        """Index entries of the weights, or of their EMA, by name."""
        others = () if self.prefix.endswith(AVERAGED) else _BESIDE
        others = tuple(self.network + prefix for prefix in others)
        others += () if self.network else (_CRITIC,)
        return {
            name: entry
            for name, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            and name.startswith(self.prefix)
            and not name.startswith(others)
        }

    def _name(self, pair: Pair) -> str:
        """Name in the checkpoint of the weight `pair`, or of its EMA.

        A frozen weight has no EMA, so for it the name is that of the weight itself.
        """
        weight = pair.ours, pair.layer
        if weight in self._frozen.alone:
            return self.network + pair.ours
        return self.prefix + (own_name(weight) if self._is_apart(pair) else pair.ours)

    def _is_apart(self, pair: Pair) -> bool:
        """Whether the EMA of `pair` is stored layer by layer, because other layers have none."""
        weight = pair.ours, pair.layer
        return pair.ours in self._frozen.partly and weight not in self._frozen.alone

    def _entry(self, pair: Pair) -> TensorStorageMetadata:
        entry = self._index.state_dict_metadata[self._name(pair)]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def dtype(self, pair: Pair) -> torch.dtype:
        return self._entry(pair).properties.dtype

    def read(self, pair: Pair) -> Tensor:
        """The whole tensor of `pair` in this project's network, in the checkpoint's dtype."""
        chunk = _whole(pair.shape) if self._is_apart(pair) else _chunk(pair)
        return self._read(self._name(pair), self._entry(pair), chunk).view(pair.shape)

    def read_whole(self, name: str) -> Tensor:
        """The tensor `name`, which the name table lacks, such as an adapter's matrix, or its EMA.

        Raises:
            ConvertError: there is no such tensor.
        """
        entry = self._index.state_dict_metadata.get(self.prefix + name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ConvertError(
                f"{self.path} has no {self.prefix}{name}: its adapters are incomplete; take another"
                " checkpoint"
            )
        return self._read(self.prefix + name, entry, _whole(entry.size))

    def _read(self, name: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> Tensor:
        whole = torch.empty(chunk.sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(name, entry, [chunk])
        held = sum(math.prod(item.lengths) for item in items)
        assert held == whole.numel(), f"{name}: {held} of {whole.numel()} numbers are stored"
        self._reader.read_data(LoadPlan(items), _TensorPlanner(whole)).wait()
        return whole


class WithTextProjection(StoredWeights):
    """The weights of a checkpoint trained on projected texts, with the text projection."""

    def __init__(self, path: Path, *, averaged: bool, critic: bool, tensors: Mapping[str, Tensor]):
        """Opens the checkpoint; `tensors` are those of the text projection, by Diffusers' names."""
        super().__init__(path, averaged=averaged, critic=critic)
        self.tensors = tensors

    def dtype(self, pair: Pair) -> torch.dtype:
        own = self.tensors.get(pair.theirs[0])
        return super().dtype(pair) if own is None else own.dtype

    def read(self, pair: Pair) -> Tensor:
        if pair.theirs[0] not in self.tensors:
            return super().read(pair)
        return pair.join([self.tensors[name] for name in pair.theirs])


def stored_shape(pair: Pair) -> tuple[int, ...]:
    """Shape in which the tensor of `pair` is stored, with all layers stacked."""
    return pair.shape if pair.layer is None else (pair.layers, *pair.shape)


def _whole(shape: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))


def _chunk(pair: Pair) -> ChunkStorageMetadata:
    front = () if pair.layer is None else (pair.layer,)
    return ChunkStorageMetadata(
        offsets=torch.Size([*front, *(0 for _ in pair.shape)]),
        sizes=torch.Size([*(1 for _ in front), *pair.shape]),
    )


def write_file(file: Path, pieces: Iterable[tuple[Pair, Tensor]]) -> list[WriteResult]:
    """Writes `pieces` as one file of a checkpoint, and returns torch's records for `write_index`.

    A piece is a pair of the name table with its tensor. `pieces` may be a generator, so that only
    one tensor is in memory.
    """
    items = (
        _item(pair.ours, tensor, _chunk(pair), size=stored_shape(pair)) for pair, tensor in pieces
    )
    return write_items(file, items)


def _item(
    name: str, tensor: Tensor, chunk: ChunkStorageMetadata, *, size: Sequence[int]
) -> tuple[WriteItem, Tensor]:
    """(write request, `tensor` in the shape of `chunk`) for this chunk of the stored tensor `name`.

    `size` is the shape of the whole stored tensor.
    """
    kind = TensorProperties(dtype=tensor.dtype)
    data = TensorWriteData(chunk=chunk, properties=kind, size=torch.Size(size))
    item = WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
    return item, tensor.reshape(chunk.sizes)


def write_index(
    folder: Path, pairs: list[Pair], dtypes: dict[str, torch.dtype], results: list[WriteResult]
) -> None:
    """Writes the index of all files of a checkpoint, and the files that state its format.

    `dtypes` are those of the stored tensors by name, and `results` are what `write_file` has
    returned for all files.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    for pair in pairs:
        chunks.setdefault(pair.ours, []).append(_chunk(pair))
    shapes = {pair.ours: torch.Size(stored_shape(pair)) for pair in pairs}
    tensors = {
        name: TensorStorageMetadata(TensorProperties(dtype=dtypes[name]), shapes[name], places)
        for name, places in chunks.items()
    }
    _finish(folder, tensors, results)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint of one file: whole `tensors` by name, and the index."""
    items, entries = [], {}
    for name, tensor in tensors.items():
        chunk, kind = _whole(tensor.shape), TensorProperties(dtype=tensor.dtype)
        items.append(_item(name, tensor.contiguous(), chunk, size=tensor.shape))
        entries[name] = TensorStorageMetadata(kind, tensor.shape, [chunk])
    _finish(file.parent, entries, write_items(file, items))


def _finish(
    folder: Path, tensors: Mapping[str, TensorStorageMetadata], results: list[WriteResult]
) -> None:
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=dict(tensors)), [results])
    torch.save({}, folder / "common.pt")
    write_format(folder)
