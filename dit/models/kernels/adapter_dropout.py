"""Dropout on the input of LoRA adapters: a kernel that reads and writes each number once.

`dit.lora.adapter` has the plain torch form, with bit-identical results.
"""

# T rows, I channels

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WORD = 2**31 - 1
_TILE = {"ROWS": 4, "BLOCK": 1024, "num_warps": 8}
"""Size of a program's tile; a program processes its rows tile by tile."""


@torch.library.custom_op(
    "dit::adapter_dropout",
    mutates_args=(),
    schema="(Tensor x, Tensor place, float rate, int key, int first) -> Tensor",
)
def adapter_dropout(x_TI: Tensor, place_T: Tensor, rate: float, key: int, first: int) -> Tensor:
    """`x_TI` with dropout: each number times 0 or 1 / (1 - rate), by a hash of its position.

    `place_T` is the position of each row in the pack, `key` the seed, and `first` the number of the
    first channel.
    """
    out_TI = torch.empty_like(x_TI, memory_format=torch.contiguous_format)
    _launch(out_TI, x_TI, place_T, rate, key, first, added=False)
    return out_TI


@torch.library.custom_op(
    "dit::adapter_dropout_add",
    mutates_args=("sum",),
    schema="(Tensor(a!) sum, Tensor x, Tensor place, float rate, int key, int first) -> ()",
)
def adapter_dropout_add(
    sum_TI: Tensor, x_TI: Tensor, place_T: Tensor, rate: float, key: int, first: int
) -> None:
    """Adds the result of `adapter_dropout` to `sum_TI`, which has the same dtype."""
    if not sum_TI.is_contiguous():
        sum_TI.add_(adapter_dropout(x_TI, place_T, rate, key, first))
        return
    _launch(sum_TI, x_TI, place_T, rate, key, first, added=True)


def _launch(out_TI: Tensor, x_TI: Tensor, place_T: Tensor, *rest: Any, added: bool) -> None:
    (rows, channels), (rate, key, first) = x_TI.shape, rest
    if x_TI.numel():
        factor = float(torch.ones((), dtype=x_TI.dtype) / (1 - rate))
        grid = (-(-rows // _TILE["ROWS"]),)
        _kernels().adapter_dropout_masked[grid](
            *(x_TI.contiguous(), place_T.contiguous(), out_TI, rows, channels),
            *(key & _WORD, key >> 31, first, round(rate * 2**31), factor),
            ADDED=added,
            **_TILE,
        )


@adapter_dropout.register_fake
def _(x_TI: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(x_TI, memory_format=torch.contiguous_format)


@adapter_dropout_add.register_fake
def _(*_arguments: Any) -> None:
    return None


def _kernels() -> Any:
    from dit.models.kernels import adapter_dropout_triton

    return adapter_dropout_triton
