"""The GPU's packed attention against the plain definition."""

from __future__ import annotations

import pytest
import torch
from dit.models.layers.attention import Spans, attend_one_by_one, attend_packed, attention_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [0, 5], ids=["tight", "padded"])
def test_varlen_equals_one_by_one(dtype, padding):
    lengths, key_lengths = (130, 1, 64, 257), (7, 300, 1, 64)
    device = torch.device("cuda")

    def starts(sizes):
        ends = [sum(sizes[: i + 1]) + padding * (i + 1) for i in range(len(sizes))]
        return (0, *ends[:-1]), ends[-1]

    (first, total), (key_first, keys) = starts(lengths), starts(key_lengths)
    spans = Spans(
        starts=first,
        lengths=lengths,
        key_starts=key_first,
        key_lengths=key_lengths,
        total=total,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(n, 4, 64, generator=generator, device=device, dtype=dtype, requires_grad=True)
        for n in (total, keys, keys)
    ]
    weight = torch.randn(total, 4, 64, generator=generator, device=device)
    real = torch.zeros(total, 1, 1, device=device)  # what padding gives means nothing
    for start, length in zip(first, lengths, strict=True):
        real[start : start + length] = 1
    weight *= real
    results = []
    for attend in (attend_one_by_one, attend_packed):
        out = attend(*inputs, spans)
        (out.float() * weight).sum().backward()
        results.append([out.detach().float() * real, *(x.grad.float().clone() for x in inputs)])
        for x in inputs:
            x.grad = None
    for plain, fast in zip(*results, strict=True):
        assert (fast - plain).norm() / plain.norm() < 1e-2
    assert attention_for(device, dtype) is attend_packed
