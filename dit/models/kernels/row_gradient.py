"""The gradient of values, written directly into the gradient of the whole row of a head.

Values are a view of the row [T, H, X] that a matrix product wrote. A gradient in separate memory
would have to be copied into the gradient of the row.

1. offered      the kernel that returns the view attaches a destination for its gradient
2. taken        attention's backward pass writes the gradient to that destination
3. row_to_fill  the kernel's own backward pass completes the row, if it receives that very gradient
"""

# T tokens, H heads, K head width, X numbers of a head in the row

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NAME = "row_gradient"


@dataclass(eq=False, slots=True)
class RowGradient:
    """The gradient [T, H, X] of a row of heads.

    Another kernel may write a part of each head, from number `begin` on.
    """

    begin: int  # numbers of each head
    row_THX: Tensor | None = None


def offered(part_THK: Tensor, place: RowGradient) -> None:
    """Attaches `place` to a view, for its gradient; slicing or copying the view loses it."""
    setattr(part_THK, _NAME, place)


def offer_of(part_THK: Tensor) -> RowGradient | None:
    """The destination that `offered` attached to this very tensor, or None."""
    return getattr(part_THK, _NAME, None)


def taken(part_THK: Tensor, place: RowGradient | None) -> Tensor:
    """Memory for the gradient of `part_THK`: inside the row's gradient if `place` is given.

    In that case the row's gradient is allocated and kept in `place`.
    """
    if place is None:
        return part_THK.new_empty(part_THK.shape)
    tokens, heads, width = part_THK.shape
    place.row_THX = part_THK.new_empty(tokens, heads, part_THK.stride(1))
    return _part(place.row_THX, place.begin, width)


def row_to_fill(
    place: RowGradient, parts: Sequence[Tensor], x_THX: Tensor
) -> tuple[Tensor, list[Tensor], int]:
    """(gradient of `x_THX`, gradients of slices to copy to it, first column of these).

    `parts` are gradients [T, H, width] of the slices after the queries and keys of each head. If
    `parts[0]` lies in the gradient that `place` holds, that gradient is returned, and `parts[0]` is
    not copied; else new memory is. `place` then holds none.
    """
    (row_THX, place.row_THX), first = (place.row_THX, None), parts[:1]
    if row_THX is not None and first:
        there, here = _part(row_THX, place.begin, first[0].shape[-1]), first[0]
        if (there.data_ptr(), there.stride()) == (here.data_ptr(), here.stride()):
            return row_THX, [*parts[1:]], place.begin + here.shape[-1]
    return torch.empty_like(x_THX), [*parts], place.begin


def _part(row_THX: Tensor, begin: int, width: int) -> Tensor:
    return row_THX[..., begin : begin + width]
