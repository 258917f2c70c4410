"""The norm of queries and keys, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dit.models.layers.queries_and_keys import HeadNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_its_gradients_are_those_of_torch(dtype):
    mine, plain = HeadNorm(24, dtype=dtype), nn.RMSNorm(24, eps=1e-5, dtype=dtype)
    random = torch.Generator().manual_seed(0)
    for module in (mine, plain):
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    # A part of a wider tensor, as queries are; the last token is nearly zero.
    x_THX = torch.randn(50, 3, 72, generator=random)
    x_THX[-1] *= 1e-3
    x_THX = x_THX.to(dtype).requires_grad_()
    weight_THK = torch.randn(50, 3, 24, generator=random).to(dtype)
    found = []
    for module in (mine, plain):
        y_THK = module(x_THX[..., 24:48])
        gradients = torch.autograd.grad((y_THK * weight_THK).sum(), (x_THX, module.weight))
        found.append((y_THK, *gradients))
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for got, want in zip(*found, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, **tolerance)
