"""The two products of an adapter, which add to what its linear computes in the same memory.

1. narrowed   A x; on the way back its part of dL/dx is added to that of the linear
2. widened    the output of the linear plus B h

Products that add their result move [T, O] and [T, I] twice each: they read and write them. With
additions of their own (and a factor alpha / r) these would be moved six and four times.
"""

# T rows, I inputs, O outputs, R rank of all parts together

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def narrowed(x_TI: Tensor, down_RI: Tensor) -> tuple[Tensor, Tensor]:
    """The input, of which the linear alone computes its output, and A x in the type of A."""
    if not x_TI.requires_grad:  # what a function returns would
        return x_TI, linear(x_TI.to(down_RI.dtype), down_RI)
    both: Any = _Narrowed.apply(x_TI, down_RI)
    return both


def widened(out_TO: Tensor, h_TR: Tensor, up_OR: Tensor, *, scale: float) -> Tensor:
    """`out_TO` + scale · B h, in its memory: of a linear's output that nothing else has."""
    out = _Widened.apply(out_TO, h_TR, up_OR, scale)
    assert isinstance(out, Tensor)
    return out


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, down_RI: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TI, down_RI)
        return x_TI, linear(x_TI.to(down_RI.dtype), down_RI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI, down_RI), (to_x_TI, to_h_TR) = ctx.saved_tensors, gradients
        # The linear has just made this gradient, and nothing else has it.
        to_x_TI.addmm_(to_h_TR.to(to_x_TI.dtype), down_RI.to(to_x_TI.dtype))
        of_down = ctx.needs_input_grad[1]
        return to_x_TI, to_h_TR.t().matmul(x_TI.to(to_h_TR.dtype)) if of_down else None


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_TO: Tensor, h_TR: Tensor, up_OR: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(h_TR, up_OR)
        ctx.scale = scale
        h_TR, up_OR = h_TR.to(out_TO.dtype), up_OR.to(out_TO.dtype)
        # Autograd refuses to change what another function gave as it was, as sums over one rank do.
        return out_TO.detach().addmm_(h_TR, up_OR.t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (h_TR, up_OR), (to_out_TO,) = ctx.saved_tensors, gradients
        narrow_TO, (_, of_h, of_up, _) = to_out_TO.to(h_TR.dtype), ctx.needs_input_grad
        return (
            to_out_TO,
            narrow_TO.matmul(up_OR).mul_(ctx.scale) if of_h else None,
            narrow_TO.t().matmul(h_TR).mul_(ctx.scale) if of_up else None,
            None,
        )
