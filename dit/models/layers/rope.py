"""Rotary positions (RoPE, arXiv:2104.09864) on any number of axes."""

# T packed tokens, A axes, K head width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """Cosines and sines of each token's angles, from its position on each axis.

    The axes share the width of a head: `widths` add up to it. Frequencies are computed, so that any
    position is valid.
    """

    def __init__(
        self,
        widths: Sequence[int],
        thetas: Sequence[float],
        *,
        dtype: torch.dtype = torch.float32,
    ):
        """`dtype` is that of the angles; float64 is what Wan, FLUX, Lumina and HiDream compute in.

        In float32 the cosine at position 1024 is off by 4e-5.
        """
        super().__init__()
        self.axes = len(widths)
        for axis, (width, theta) in enumerate(zip(widths, thetas, strict=True)):
            exponent = torch.arange(0, width, 2, dtype=dtype) / width
            self.register_buffer(f"frequency_{axis}", 1.0 / theta**exponent, persistent=False)

    def forward(self, position_TA: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, K], float32."""
        frequencies = [self.get_buffer(f"frequency_{axis}") for axis in range(self.axes)]
        parts = [
            torch.outer(position_TA[:, axis].to(frequency.dtype), frequency)
            for axis, frequency in enumerate(frequencies)
        ]
        angle_TK = torch.cat(parts * 2, dim=-1)
        return angle_TK.cos().float(), angle_TK.sin().float()


class _Rotate(torch.autograd.Function):
    """Keeps nothing of x: the way back is the rotation by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TK, sin_TK)
        return _turned(x_THK, cos_TK, sin_TK, sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _turned(*gradients, *ctx.saved_tensors, sign=-1), None, None


def _turned(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor, *, sign: int) -> Tensor:
    half = x_THK.shape[-1] // 2
    wide_THK, sin = x_THK.float(), sin_TK[:, None, :half]
    out_THK = wide_THK * cos_TK[:, None]
    out_THK[..., :half].addcmul_(wide_THK[..., half:], sin, value=-sign)
    out_THK[..., half:].addcmul_(wide_THK[..., :half], sin, value=sign)
    return out_THK.type_as(x_THK)


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turns each pair (i, i + K/2) of a head by the token's angles, in float32."""
    turned_THK = _Rotate.apply(x_THK, cos_TK, sin_TK)
    assert isinstance(turned_THK, Tensor)
    return turned_THK
