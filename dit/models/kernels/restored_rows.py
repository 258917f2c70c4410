"""Dequantizes 8-bit matrices for matrix products, by a kernel that moves 3 bytes per number.

`dit.models.stacks.frozen_blocks.restored` has the same operation in plain torch, with bit-identical
results.
"""

# O rows, I numbers of a row

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COLUMNS = 512
_TILE = {"ROWS": 8, "BLOCK": COLUMNS, "num_warps": 4}
"""Launch parameters: a program dequantizes 8 rows x 512 columns, 32 numbers per thread."""


@torch.library.custom_op(
    "dit::restored_rows",
    mutates_args=(),
    schema="(Tensor bytes, Tensor exponents, ScalarType dtype) -> Tensor",
)
def restored_rows(bytes_OI: Tensor, exponent_O: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [O, I] in `dtype`: float8_e4m3fn numbers times the float8_e8m0fnu scale of a row.

    `bytes_OI` are the bits of the numbers and `exponent_O` the bits of the scales, as uint8.
    Numbers of a row must be contiguous; rows and scales may be strided.
    """
    rows, width = bytes_OI.shape
    out_OI = bytes_OI.new_empty(rows, width, dtype=dtype)
    if out_OI.numel():
        _kernels().restored_rows[-(-rows // _TILE["ROWS"]), -(-width // COLUMNS)](
            *(bytes_OI, exponent_O, out_OI, rows, width),
            *(bytes_OI.stride(0), exponent_O.stride(0)),
            **_TILE,
        )
    return out_OI


@restored_rows.register_fake
def _(bytes_OI: Tensor, exponent_O: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return bytes_OI.new_empty(bytes_OI.shape, dtype=dtype)


def _kernels() -> Any:
    from dit.models.kernels import restored_rows_triton

    return restored_rows_triton
