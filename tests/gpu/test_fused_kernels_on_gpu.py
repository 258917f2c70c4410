"""Fused kernels against their plain forms on a GPU, and against themselves."""

from __future__ import annotations

import pytest
import torch

from dit.lora.adapter import adapter_key, dropped
from dit.models.layers.per_sample import kernels_run_on
from tests.fused_kernels import CALLS, ROWS, AcrossCall, AdaLNCall, HeadsCall, errors

pytestmark = pytest.mark.gpu

MOST = 1.1
"""Error over that of the plain form, which rounds more often; a tenth is for chance."""
SHAPES = {"dit_xl": (1152, 16), "cosmos_7b": (4096, 32), "wan_14b": (5120, 40)}  # width, heads
PACKS = ROWS | {"a pack": [row for row in range(6) for _ in range(700)]}
CUDA = "cuda"


def _check(call, exact):
    """Accurate, and the same bit for bit when it runs again."""
    fused = call.results(fused=True)
    for mine, plain, size in errors(fused, call.results(), exact):
        assert mine <= MOST * plain + 1e-6 * size
    assert all(map(torch.equal, fused, call.results(fused=True)))


def test_kernels_run_here():
    assert kernels_run_on(torch.device(CUDA))


@pytest.mark.parametrize("levels", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rows", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_adaln_errs_no_more_than_torch(shape, rows, call, levels):
    kinds = {"tokens": torch.bfloat16, "levels": levels, "device": CUDA}
    call = AdaLNCall.of(call, rows, shape[0], **kinds)
    _check(call, call.results(dtype=torch.float64))


@pytest.mark.parametrize("tokens", [0, 1, 130, 5000])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_queries_and_keys_err_no_more_than_torch(shape, tokens):
    (width, heads), dtype = shape, torch.bfloat16
    head_width = width // heads
    call = HeadsCall.of((tokens, heads, head_width), others=(head_width,), dtype=dtype, device=CUDA)
    _check(call, call.exact())


@pytest.mark.parametrize("angles", ["of tokens", "of heads, twisted"])
@pytest.mark.parametrize("lengths", [(0,), (1,), (5000,), (5000, 512), (900, 512, 257)])
def test_norms_across_heads_err_no_more_than_torch(lengths, angles):
    call = AcrossCall.of(lengths, (40, 128), dtype=torch.bfloat16, angles=angles, device=CUDA)
    _check(call, call.exact())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_dropout_has_the_bits_of_torch(shape):
    x_TI = torch.randn(900, shape[0], dtype=torch.bfloat16, device=CUDA)
    where = {"rate": 0.1, "key": adapter_key(7, "a"), "first": 5 * shape[0]}
    where["place_T"] = torch.randint(0, 2**31 - 1, (900,), device=CUDA)
    (_, fused), (_, plain) = (dropped(x_TI, **where, fused_kernels=on) for on in (True, False))
    assert torch.equal(fused, plain)
