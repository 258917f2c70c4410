"""Rows of weights (`ddp.sharding=weights`): which of them a data rank has, and how it keeps them.

1. RowShares   which rows of a weight a data rank has
2. PackedRows  frozen rows that are kept as bytes
3. put_rows    numbers into rows, whichever way they are kept; `numbers_of` is its inverse
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_ROWS = "rows"
"""Mark of a parameter that is some rows of a weight."""
_PACKED = "packed_rows"
"""Mark of a weight whose rows are kept as bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShares:
    """How the rows of a weight are cut into one part for each data rank, as `torch.chunk` does.

    The last parts may have fewer rows than the others, or none.
    """

    shape: torch.Size  # of the weight; of this rank's part under tensor parallelism
    dtype: torch.dtype  # of the weight in a pass; rows of trained ones are float32
    ranks: int
    rank: int

    def part_of(self, rank: int) -> slice:
        """The numbers of the flattened weight that data rank `rank` has."""
        rows, width = self.shape[0], self.shape[1:].numel()
        size = -(-rows // self.ranks)
        return slice(min(rank * size, rows) * width, min((rank + 1) * size, rows) * width)

    @property
    def part(self) -> slice:
        """The numbers of the flattened weight that this rank has."""
        return self.part_of(self.rank)

    def parts(self) -> list[tuple[int, slice]]:
        """(rank, part of the flattened weight) of all ranks that have one."""
        every = ((rank, self.part_of(rank)) for rank in range(self.ranks))
        return [(rank, part) for rank, part in every if part.stop > part.start]


def rows_of(weight: Tensor) -> RowShares | None:
    """How a weight is cut into the rows that this parameter holds; None for a whole weight."""
    return getattr(weight, _ROWS, None)


def mark_rows(own: nn.Parameter, rows: RowShares) -> None:
    """Tells which rows of a weight a parameter is."""
    setattr(own, _ROWS, rows)


class PackedRows(Protocol):
    """A form in which the rows of a frozen weight are kept as bytes: uint8 with as many rows.

    So they are cut, sent and gathered as any others; what computes with them unpacks them.
    """

    def shape(self, whole: torch.Size, /) -> torch.Size:
        """Shape of the bytes that store a weight of shape `whole`."""
        ...

    def pack(self, rows: Tensor, /) -> Tensor:
        """The bytes of `rows`; tensor ranks may have to make them together."""
        ...

    def unpack(self, rows: Tensor, /, dtype: torch.dtype) -> Tensor:
        """The rows in `dtype`, from their bytes."""
        ...


def keep_packed(weight: nn.Parameter, packed: PackedRows) -> None:
    """Makes the rows of a weight without memory be kept as bytes, once it is in shares."""
    setattr(weight, _PACKED, packed)


def numbers_of(own: Tensor) -> Tensor:
    """The numbers of a parameter, or of its rows, as a flat tensor that must not be written to."""
    packed, rows = packing_of(own), rows_of(own)
    if packed is None or rows is None:
        return own.detach().view(-1)
    return packed.unpack(own.detach(), rows.dtype).view(-1)


def put_rows(own: Tensor, values: Tensor) -> None:
    """Gives the rows of a weight their numbers, flat; the tensor ranks of a weight all do."""
    packed, rows = packing_of(own), rows_of(own)
    if packed is None or rows is None:
        own.detach().view(-1).copy_(values)
    elif own.numel():
        own.detach().copy_(packed.pack(values.to(rows.dtype).view(-1, *rows.shape[1:])))


def packing_of(weight: Tensor) -> PackedRows | None:
    """The form in which rows of a weight are kept as bytes; None if they are plain numbers."""
    return getattr(weight, _PACKED, None)
