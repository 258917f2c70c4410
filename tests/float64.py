"""Networks in float64, where what they compute does not depend on the processor's kernels.

Ours and Diffusers' ask for float32 in places: levels, angles, norms. `in_float64` gives them
float64 there as well, so that two networks of equal arithmetic differ by rounding of 1e-16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dit.batch import PackedBatch
from dit.models.positions import padded_positions

IN_FLOAT64 = 1e-9
"""Rounding makes gaps below 1e-12; a number rounded to float32 on the way makes 2e-9 or more."""
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _Widened(TorchFunctionMode):
    """Gives float64 where an operation names float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **named)


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Networks that are built and run here compute in float64 throughout."""
    padded_positions.cache_clear()
    with pytest.MonkeyPatch.context() as patch, _Widened():
        # Backward passes call methods of ours, where no mode is heard.
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            padded_positions.cache_clear()


def widened(batch: PackedBatch, again: PackedBatch) -> PackedBatch:
    """`batch` in float64: its latents and texts, and the positions of `again`.

    `again` is the same pack, made in float64. Its positions are not rounded to float32, but its
    latents are other ones, because a generator draws others in float64.
    """
    doubled = batch.with_tensors({name: _doubled(x) for name, x in batch.tensors.items()})
    return replace(doubled, position_TA=again.position_TA, fps_N=again.fps_N)


def _doubled(value: Tensor) -> Tensor:
    return value.double() if value.dtype == torch.float32 else value
