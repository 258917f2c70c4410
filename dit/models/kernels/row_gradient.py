"""The gradient of values, written directly into the gradient of queries, keys and values.

A matrix product writes queries, keys and values as one tensor [T, H, X], and values are a view of
it. If attention wrote their gradient to separate memory, it would have to be copied into the
gradient of the whole tensor.

1. offered      the autograd function that returns the view attaches a destination to it
2. taken        attention's backward pass writes the gradient of values to that destination
3. row_to_fill  the autograd function's backward pass fills in the rest of the whole gradient
"""

# T tokens, H heads, K head width, X numbers of a head in the whole tensor

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NAME = "row_gradient"


@dataclass(eq=False, slots=True)
class RowGradient:
    """A destination for the gradient of values, in the gradient [T, H, X] of the whole tensor."""

    begin: int  # first number of the values in each head
    row_THX: Tensor | None = None  # the whole gradient; None until `taken` allocates it


def offered(part_THK: Tensor, place: RowGradient) -> None:
    """Attaches the destination `place` to the view `part_THK`.

    A slice or copy of the view does not have the attachment.
    """
    setattr(part_THK, _NAME, place)


def offer_of(part_THK: Tensor) -> RowGradient | None:
    """The destination that `offered` attached to the tensor `part_THK`, or None."""
    return getattr(part_THK, _NAME, None)


def taken(part_THK: Tensor, place: RowGradient | None) -> Tensor:
    """Memory [T, H, K] to which attention writes the gradient of `part_THK`.

    If `place` is given, the memory is a view of the whole gradient, which is allocated and kept in
    `place.row_THX`.
    """
    if place is None:
        return part_THK.new_empty(part_THK.shape)
    tokens, heads, width = part_THK.shape
    place.row_THX = part_THK.new_empty(tokens, heads, part_THK.stride(1))
    return _part(place.row_THX, place.begin, width)


def row_to_fill(
    place: RowGradient, parts: Sequence[Tensor], x_THX: Tensor
) -> tuple[Tensor, list[Tensor], int]:
    """(memory for the gradient of `x_THX`, gradients still to copy into it, their first column).

    `parts` are gradients [T, H, width] of the slices after queries and keys. If `parts[0]` is the
    view that `taken` returned, the memory is the whole gradient in `place`, and `parts[0]` needs no
    copy; otherwise the memory is new. `place` is emptied.
    """
    (row_THX, place.row_THX), first = (place.row_THX, None), parts[:1]
    if row_THX is not None and first:
        there, here = _part(row_THX, place.begin, first[0].shape[-1]), first[0]
        if (there.data_ptr(), there.stride()) == (here.data_ptr(), here.stride()):
            return row_THX, [*parts[1:]], place.begin + here.shape[-1]
    return torch.empty_like(x_THX), [*parts], place.begin


def _part(row_THX: Tensor, begin: int, width: int) -> Tensor:
    return row_THX[..., begin : begin + width]
