"""Row shards of weights (`ddp.sharding=weights`): which rows a data rank has, and their storage.

1. RowShares   the division of a weight's rows among data ranks
2. PackedRows  frozen rows that are stored as bytes
3. put_rows    writes numbers into rows in either storage; `numbers_of` reads them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_ROWS = "rows"
"""Attribute that marks a parameter which holds only some rows of a weight."""
_PACKED = "packed_rows"
"""Attribute that marks a weight whose rows are stored as bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShares:
    """The division of a weight's rows into one shard for each data rank, as by `torch.chunk`.

    The last shards may have fewer rows than the others, or no rows.
    """

    shape: torch.Size  # of the weight; of this rank's part under tensor parallelism
    dtype: torch.dtype  # of the weight in a pass; rows of trained weights are float32
    ranks: int
    rank: int

    def part_of(self, rank: int) -> slice:
        """The slice of the flattened weight in the shard of data rank `rank`."""
        rows, width = self.shape[0], self.shape[1:].numel()
        size = -(-rows // self.ranks)
        return slice(min(rank * size, rows) * width, min((rank + 1) * size, rows) * width)

    @property
    def part(self) -> slice:
        """The slice of the flattened weight in this rank's shard."""
        return self.part_of(self.rank)

    def parts(self) -> list[tuple[int, slice]]:
        """(rank, slice of the flattened weight) for each rank that has rows."""
        every = ((rank, self.part_of(rank)) for rank in range(self.ranks))
        return [(rank, part) for rank, part in every if part.stop > part.start]


def rows_of(weight: Tensor) -> RowShares | None:
    """The division of the weight whose rows `weight` has; None if `weight` is a whole weight."""
    return getattr(weight, _ROWS, None)


def mark_rows(own: nn.Parameter, rows: RowShares) -> None:
    """Records which rows of a weight the parameter `own` holds."""
    setattr(own, _ROWS, rows)


class PackedRows(Protocol):
    """Interface of frozen rows that are stored as bytes, in a uint8 tensor with equally many rows.

    Such rows are divided, sent and gathered like other rows, and unpacked where they are used.
    """

    def shape(self, whole: torch.Size, /) -> torch.Size:
        """Shape of the uint8 tensor for a weight of shape `whole`."""
        ...

    def pack(self, rows: Tensor, /) -> Tensor:
        """`rows` as bytes; tensor ranks may have to compute them together."""
        ...

    def unpack(self, rows: Tensor, /, dtype: torch.dtype) -> Tensor:
        """The numbers in the packed `rows`, in `dtype`."""
        ...


def keep_packed(weight: nn.Parameter, packed: PackedRows) -> None:
    """Makes sharding store the rows of `weight`, which has no memory yet, as bytes."""
    setattr(weight, _PACKED, packed)


def numbers_of(own: Tensor) -> Tensor:
    """The numbers of the parameter `own`, or of its rows, flat; not to be written to."""
    packed, rows = packing_of(own), rows_of(own)
    if packed is None or rows is None:
        return own.detach().view(-1)
    return packed.unpack(own.detach(), rows.dtype).view(-1)


def put_rows(own: Tensor, values: Tensor) -> None:
    """Writes flat `values` into the rows `own` of a weight; all tensor ranks call it."""
    packed, rows = packing_of(own), rows_of(own)
    if packed is None or rows is None:
        own.detach().view(-1).copy_(values)
    elif own.numel():
        own.detach().copy_(packed.pack(values.to(rows.dtype).view(-1, *rows.shape[1:])))


def packing_of(weight: Tensor) -> PackedRows | None:
    """The byte format in which a weight's rows are stored; None for plain numbers."""
    return getattr(weight, _PACKED, None)
