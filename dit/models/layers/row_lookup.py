"""Rows of a learned table, looked up by tokens."""

# T packed tokens, R rows of a table, X any width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def look_up(table_RX: Tensor, index_T: Tensor) -> Tensor:
    """`table_RX[index_T]`, for tables of a few hundred rows that many tokens share."""
    rows_TX = _LookUp.apply(table_RX, index_T)
    assert isinstance(rows_TX, Tensor)
    return rows_TX


class _LookUp(torch.autograd.Function):
    """Plain indexing, whose own backward pass sorts the indices and adds row after row.

    The table is [R, X], its rows and their gradient are [T, X].
    """

    @staticmethod
    def forward(ctx: Any, table_RX: Tensor, index_T: Tensor) -> Tensor:
        ctx.save_for_backward(index_T)
        ctx.rows = len(table_RX)
        return table_RX[index_T]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index_T,), (gradient_TX,) = ctx.saved_tensors, gradients
        row_R1 = torch.arange(ctx.rows, device=index_T.device)[:, None]
        # A product of matrices sums in float32, in an order that is always the same.
        return (index_T == row_R1).to(gradient_TX.dtype) @ gradient_TX, None
