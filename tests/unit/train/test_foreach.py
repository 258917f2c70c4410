"""Operations on lists of weights give, bit for bit, what loops over the weights gave."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from dit.train import foreach

SHAPES = [(1,), (37, 19), (5,), (64, 3, 3), (1000,)]


def _tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.3, 1.0])
def test_an_average_moves_as_in_a_loop(rate):
    averages, values, expected = _tensors(1), _tensors(2), _tensors(1)
    foreach.lerp(averages, values, rate)
    for average, value in zip(expected, values, strict=True):
        average.lerp_(value, rate)
    assert all(torch.equal(a, b) for a, b in zip(averages, expected, strict=True))
    foreach.lerp([], [], rate)  # a rank may have no part of any weight


def test_differences_and_norms():
    kept, weights = _tensors(1), _tensors(2)
    foreach.subtract(kept, weights)
    expected = [a - b for a, b in zip(_tensors(1), _tensors(2), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
    assert torch.equal(foreach.norms(kept), torch.stack([x.norm() for x in expected]))
    foreach.copy(kept, weights)
    assert all(torch.equal(a, b) for a, b in zip(kept, weights, strict=True))


def test_gradients_are_clipped_as_megatron_clips_them(groups, monkeypatch):
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    lists, numbers = [_tensors(1), _tensors(3)], [_tensors(1), _tensors(3)]
    theirs, _ = local_multi_tensor_l2_norm(0, None, [lists[0]], False)
    local_multi_tensor_scale(0, None, lists, 0.37)
    foreach.install_norm_and_scale()
    assert clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm
    assert clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale
    norm, _ = clip_grads.l2_norm_impl(0, None, [numbers[0]], False)
    clip_grads.multi_tensor_scale_impl(0, None, numbers, 0.37)
    assert torch.equal(norm, theirs) and norm.shape == (1,)
    assert all(torch.equal(a, b) for a, b in zip(lists[1], numbers[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(numbers[0], _tensors(1), strict=True))
    clip_grads.multi_tensor_scale_impl(0, None, [numbers[0]] * 2, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(*numbers, strict=True))
