"""Assigns each weight and its state to the rank that writes and reads it, in even amounts."""

# T tensor ranks, D data ranks

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.distributed.data_parallel import Holding
from dit.distributed.full_sharding import stored_of
from dit.distributed.row_shares import rows_of
from dit.models.parameter_groups import Weight, own_name
from dit.models.stacks.offload import PinnedRows

_FLOAT32_BYTES = 4
_MAIN_REPLICA = (0, 0, 0)
_ROWS = PinnedRows()  # every save has tensors of the same sizes


class Owner(NamedTuple):
    """(tensor rank, data rank) of the rank, in its pipeline stage, that stores a weight."""

    tensor: int  # rank in the tensor-parallel group
    data: int  # rank in the data-parallel group, context ranks included


class WeightSize(NamedTuple):
    """Input of `assign`: bytes of a weight, whether tensor ranks divide it, and who updates it."""

    bytes: int  # with its state, on one tensor rank
    split: bool  # each tensor rank has a part of its own; else all of them have the same
    holders: Sequence[int] = ()  # data ranks that update most of it; () if each updates all of it


def assign(sizes: Sequence[WeightSize], *, tensor_ranks: int, data_ranks: int) -> list[Owner]:
    """The rank that writes and reads each weight, in the order of `sizes`.

    Of a `split` weight, each tensor rank stores its own part, at the data rank that is returned.
    The largest weights are assigned first. Each goes to a rank that updates most of it, so that
    little is sent; or, if that rank would then exceed the mean, to the rank with the fewest bytes
    so far. If all weights are split, or none is, no rank gets more than the mean plus the largest
    weight.
    """
    bytes_TD = np.zeros((tensor_ranks, data_ranks))
    total = sum(size.bytes * (tensor_ranks if size.split else 1) for size in sizes)
    even = total / bytes_TD.size
    places = [Owner(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i].bytes):
        size = sizes[index]
        used_TD = bytes_TD.max(axis=0, keepdims=True) if size.split else bytes_TD
        place = _least(used_TD, size.holders or range(data_ranks))
        if used_TD[place] + size.bytes > even:
            place = _least(used_TD, range(data_ranks))
        bytes_TD[slice(None) if size.split else place.tensor, place.data] += size.bytes
        places[index] = place
    return places


def _least(used_TD: np.ndarray, data_ranks: Sequence[int]) -> Owner:
    """The rank with the fewest bytes among `data_ranks`; the first of equal ones."""
    among = used_TD[:, list(data_ranks)]
    tensor, number = np.unravel_index(int(among.argmin()), among.shape)
    return Owner(int(tensor), data_ranks[int(number)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedWeight:
    """A weight on this rank, and the rank that writes and reads it."""

    entry: ShardedTensor  # Megatron-Core's description of it; `entry.data` is the weight
    split: bool  # each tensor rank has a part of its own
    place: Owner  # who writes and reads it
    trained: bool  # the optimizer has state for it
    # The part that each data rank updates or holds; () if each data rank updates the whole weight.
    holdings: Sequence[Holding]
    apart: bool = False  # its state is stored by itself: other layers of the same name have none

    @property
    def weight(self) -> Tensor:
        """The weight; with FSDP, this rank's rows of it."""
        return data_of(self.entry)

    @property
    def in_shares(self) -> bool:
        return rows_of(self.weight) is not None

    @property
    def numel(self) -> int:
        """Number of elements of the whole weight, over all data ranks."""
        return math.prod(self.entry.local_shape)

    def empty(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Device memory, uninitialised, in the shape of the whole weight."""
        return self.weight.new_empty(self.entry.local_shape, dtype=dtype)

    def stored(self, prefix: str, data: Tensor) -> ShardedTensor:
        """`data` as a checkpoint tensor, whose name is `prefix` plus the name of the weight."""
        entry = self.entry
        if prefix and self.apart:  # Megatron-Core cannot store only some layers of a stacked tensor
            assert entry.axis_fragmentations is not None
            entry = replace(
                entry,
                data=None,
                key=own_name(weight_of(entry)),
                global_shape=entry.global_shape[1:],
                global_offset=entry.global_offset[1:],
                axis_fragmentations=entry.axis_fragmentations[1:],
                prepend_axis_num=0,
            )
        key = f"{prefix}{entry.key}"
        return replace(entry, key=key, data=data, dtype=data.dtype, replica_id=_MAIN_REPLICA)

    def on_host(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Host memory, uninitialised, in the shape of the whole weight."""
        empty = _ROWS.empty if self.weight.is_cuda else torch.empty
        return empty(self.entry.local_shape, dtype=dtype)


def share_weights(
    modules: Sequence[MegatronModule],
    groups: ProcessGroupCollection,
    *,
    held: Mapping[Tensor, Sequence[Holding]],
    trained: Container[Tensor],
    tensors: int,
    chosen: Callable[[str], bool] = lambda _: True,
    apart: Container[str] = (),
) -> list[SharedWeight]:
    """The weights of `modules` with `chosen` checkpoint names, each with the rank that stores it.

    The list has the same order on all ranks of the pipeline stage. `held` lists the ranks that
    update, or hold, the shards of each `trained` weight. The state of a weight is `tensors` float32
    tensors in its shape; for weights with a name in `apart`, each layer's state is stored
    separately.
    """
    entries = [e for module in modules for e in entries_of(module) if chosen(e.key)]
    tensor_ranks, me = groups.tp.size(), groups.tp.rank()
    split = [tensor_ranks > 1 and _is_part(entry) for entry in entries]
    sizes = []
    for entry, of_each in zip(entries, split, strict=True):
        weight, numel = data_of(entry), math.prod(entry.local_shape)
        state = tensors * _FLOAT32_BYTES if weight in trained else 0
        holders = _main_holders(held.get(weight, ()))
        sizes.append(WeightSize(numel * (entry.dtype.itemsize + state), of_each, holders))
    places = assign(sizes, tensor_ranks=tensor_ranks, data_ranks=groups.dp_cp.size())
    return [
        SharedWeight(
            entry=entry,
            split=of_each,
            place=Owner(me, place.data) if of_each else place,
            trained=data_of(entry) in trained,
            holdings=held.get(data_of(entry), ()),
            apart=entry.key in apart,
        )
        for entry, of_each, place in zip(entries, split, places, strict=True)
    ]


def data_of(entry: ShardedTensor) -> Tensor:
    assert entry.data is not None
    return entry.data


def stored_by(module: MegatronModule) -> Iterable[Any]:
    """The entries that Megatron-Core stores for a module."""
    in_shares = stored_of(module)
    return module.sharded_state_dict().values() if in_shares is None else in_shares


def entries_of(module: MegatronModule) -> Iterator[ShardedTensor]:
    """Entries that Megatron-Core stores for weights of `module`; with FSDP, this rank's rows."""
    for entry in stored_by(module):
        if isinstance(entry, ShardedTensor) and entry.data is not None:
            yield entry


def weight_of(entry: ShardedTensor) -> Weight:
    """(name of the weight in a checkpoint, index of its layer or None outside a stack)."""
    return entry.key, entry.global_offset[0] if entry.prepend_axis_num else None


def _is_part(entry: ShardedTensor) -> bool:
    """Whether ranks divide the tensor of `entry`; the layers of a stack do not count as parts."""
    return tuple(entry.local_shape) != tuple(entry.global_shape[entry.prepend_axis_num :])


def _main_holders(parts: Sequence[Holding]) -> list[int]:
    """The ranks that update the largest of the `parts` of a weight."""
    largest = max((part.size for part in parts), default=0)
    return [part.rank for part in parts if part.size == largest]
