"""Matrices that no step changes: rounded to 8 bits, or on the host until their turn.

1. rounded         a matrix -> float8_e4m3 (arXiv:2209.05433) and a factor for each of its rows
2. FrozenMatrix    the matrix of a linear, made for each product and kept by none
3. frozen_product  x W^T, which asks for the matrix again on the way back
"""

# T rows, I inputs, O outputs (both of this tensor rank)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

ROUNDED = torch.float8_e4m3fn
_MANTISSA, _EXPONENT = 0.875, 9
"""The largest number of the format, 448, as `torch.frexp` has it."""
_MOST_EXPONENT = 100
"""Of factors: beyond it they, or what they multiply, leave the range of bfloat16 and float32."""


def rounded(
    weight_OI: Tensor, *, columns: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """The matrix in 8 bits and a factor [O] for each row, which is that of the whole row.

    `columns` are the ranks that share the columns of a matrix; all of them call it.

    A factor is a power of two, the least with which the row fits. So what is restored has four
    significant bits, which bfloat16 holds as exactly as float32.
    """
    most_O = weight_OI.abs().amax(dim=1).float()
    if columns is not None and columns.size() > 1:
        dist.all_reduce(most_O, op=dist.ReduceOp.MAX, group=columns)
    mantissa_O, exponent_O = torch.frexp(most_O)
    exponent_O = exponent_O - _EXPONENT + (mantissa_O > _MANTISSA)
    exponent_O = exponent_O.clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    factor_O = torch.ldexp(torch.ones_like(most_O), exponent_O)
    return (weight_OI.float() / factor_O[:, None]).to(ROUNDED), factor_O


def restored(weight_OI: Tensor, factor_O: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `rounded`; exact."""
    return weight_OI.to(dtype).mul_(factor_O[:, None].to(dtype))


class FrozenMatrix:
    """What a linear multiplies with."""

    def __init__(self, weight: nn.Parameter):
        self.weight, self.dtype = weight, weight.dtype
        self.factor_O: Tensor | None = None  # of a matrix in 8 bits
        self.fetched: Callable[[], Tensor] | None = None  # of one whose place is on the host

    def round(self, device: torch.device, *, columns: dist.ProcessGroup | None) -> None:
        """Puts 8 bits in the place of the weight, on the device; see `rounded`."""
        whole = self.weight.detach().to(device)
        self.weight.data, self.factor_O = rounded(whole, columns=columns)

    def __call__(self) -> Tensor:
        """The matrix [O, I] on the device, in the type of the network."""
        weight = self.weight.detach() if self.fetched is None else self.fetched()
        if self.factor_O is None:
            return weight
        return restored(weight, self.factor_O, self.dtype)


def frozen_product(x_TI: Tensor, matrix: FrozenMatrix, bias_O: Tensor | None = None) -> Tensor:
    """The output of a linear; nothing of it is kept for the way back."""
    out = _Product.apply(x_TI, bias_O, matrix)
    assert isinstance(out, Tensor)
    return out


class _Product(torch.autograd.Function):
    """Autograd would keep the matrix of each product on the device, in its whole width."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, bias_O: Tensor | None, matrix: FrozenMatrix) -> Tensor:
        ctx.matrix = matrix
        return linear(x_TI, matrix(), bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TO,), (of_x, of_bias, _) = gradients, ctx.needs_input_grad
        return (
            gradient_TO.matmul(ctx.matrix()) if of_x else None,
            gradient_TO.flatten(0, -2).sum(0) if of_bias else None,
            None,
        )
