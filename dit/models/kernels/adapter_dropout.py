"""Dropout on the input of LoRA adapters, by a kernel that reads and writes each number once.

`dit.lora.adapter` has the same operation in plain torch, with bit-identical results.
"""

# T rows, I channels

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WORD = 2**31 - 1
_TILE = {"ROWS": 4, "BLOCK": 1024, "num_warps": 8}
"""Launch parameters: a program processes 4 rows, 1024 channels at a time."""


@torch.library.custom_op(
    "dit::adapter_dropout",
    mutates_args=(),
    schema="(Tensor x, Tensor place, float rate, int key, int first) -> Tensor",
)
def adapter_dropout(x_TI: Tensor, place_T: Tensor, rate: float, key: int, first: int) -> Tensor:
    """`x_TI` with dropout: each number times 0 or 1 / (1 - rate), by a hash of its position.

    `place_T` is the index of each row in the pack, `key` is the seed, and `first` is the index of
    the first channel (a tensor rank may have only some channels).
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
