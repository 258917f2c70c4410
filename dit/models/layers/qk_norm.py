"""RMSNorm of queries and keys, per head."""

# T tokens, H heads, K head width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HeadNorm(nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467) over the width of a head, with one weight for all heads.

    GPUs have a kernel for it. On a CPU torch composes it of small parts, whose backward pass goes
    over all tokens twice as often as it must.
    """

    def __init__(self, width: int, *, dtype: torch.dtype):
        # eps as in Diffusers' attention, which differs from its other norms.
        super().__init__(width, eps=1e-5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        y_THK = _Normalised.apply(x, self.weight, self.eps)
        assert isinstance(y_THK, Tensor)
        return y_THK


class _Normalised(torch.autograd.Function):
    """y = n · w with n = x / rms(x), in float32."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        wide_THK = x_THK.float()
        pace_TH1 = (wide_THK.square().mean(-1, keepdim=True) + eps).rsqrt()
        n_THK = wide_THK * pace_TH1
        ctx.save_for_backward(n_THK, pace_TH1, weight_K)
        return (n_THK * weight_K).type_as(x_THK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """With g = dL/dy: dL/dw = sum g · n, dL/dx = (g · w - n · mean(g · w · n)) / rms(x)."""
        (n_THK, pace_TH1, weight_K), (gradient_THK,) = ctx.saved_tensors, gradients
        g_THK, w_K = gradient_THK.float(), weight_K.float()
        product_THK = g_THK * n_THK
        mean_TH1 = (product_THK @ w_K)[..., None] / len(w_K)
        to_x_THK = (g_THK * w_K).addcmul_(n_THK, mean_TH1, value=-1).mul_(pace_TH1)
        to_weight_K = product_THK.sum((0, 1))
        return to_x_THK.type_as(gradient_THK), to_weight_K.type_as(weight_K), None
