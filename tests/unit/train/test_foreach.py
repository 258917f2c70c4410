"""Operations on lists of weights give what loops over the weights give."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from dit.train.optimizer import foreach

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
    assert foreach.norms(kept).tolist() == pytest.approx([float(x.norm()) for x in expected])
    foreach.copy(kept, weights)
    assert all(torch.equal(a, b) for a, b in zip(kept, weights, strict=True))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3_000_000])
def test_a_norm_does_not_depend_on_how_ranks_share_its_numbers(size):
    """Torch's own is 5e-5 off for 3 million numbers."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0)) + 0.3
    true = float(numbers.double().norm())
    for parts in (1, 7):
        shares = foreach.norms(numbers.tensor_split(parts)).double()
        assert float(shares.norm()) == pytest.approx(true, rel=2e-7)
    whole, _ = foreach._l2_norm(0, None, [[*numbers.tensor_split(7)]], False)
    assert float(whole) == pytest.approx(true, rel=2e-7)


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
    assert norm.shape == (1,) and float(norm) == pytest.approx(float(theirs))
    assert all(torch.equal(a, b) for a, b in zip(lists[1], numbers[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(numbers[0], _tensors(1), strict=True))
    clip_grads.multi_tensor_scale_impl(0, None, [numbers[0]] * 2, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(*numbers, strict=True))
