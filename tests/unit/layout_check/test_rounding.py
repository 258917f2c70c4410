"""How far apart rounding of gradients may bring weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.config import OptimizerConfig
from dit.layout_check.rounding import Reach, gradient_sizes
from dit.train.optimizer.adamw import GroupStepAdam

ROUNDING, RATE, STEPS = 1e-4, 1e-3, 5


def _train(gradients: list[Tensor], *, eps: float = 1e-8) -> tuple[Tensor, Tensor]:
    """Weights after AdamW's updates, and how far rounding may have brought them."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, gradients[0].numel()))
    adam = GroupStepAdam([p], lr=RATE, betas=(0.9, 0.95), eps=eps, weight_decay=0.1)
    inner = SimpleNamespace(is_stub_optimizer=False, optimizer=adam, get_parameters=lambda: [p])
    megatron: Any = SimpleNamespace(chained_optimizers=[inner], param_groups=adam.param_groups)
    reach = Reach(megatron, OptimizerConfig(), rounding=ROUNDING)
    for gradient in gradients:
        p.grad = gradient.clone()
        adam.step()
        reach.add_update()
    (bound,) = reach.bounds
    return p.detach(), bound


def _gradients(seed: int) -> list[Tensor]:
    """Of 4,000 elements from 1e-12 to 1, so that Adam's eps and rounding meet every size."""
    draw = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.linspace(-12, 0, 4000)
    return [sizes * torch.randn(4000, generator=draw) for _ in range(STEPS)]


@pytest.mark.parametrize("eps", [1e-8, 1e-15])
def test_gradients_that_differ_by_rounding_stay_in_reach(eps):
    """The worst found of 20 draws of rounding, each as large as allowed, in either direction."""
    gradients = _gradients(0)
    weights, bound = _train(gradients, eps=eps)
    worst = torch.zeros_like(weights)
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        signs = [torch.randn(g.shape, generator=draw).sign() for g in gradients]
        signs = [signs[0] if seed % 2 else sign for sign in signs]  # some always in one direction
        moved = [
            g + ROUNDING * gradient_sizes([g])[0] * sign
            for g, sign in zip(gradients, signs, strict=True)
        ]
        other, _ = _train(moved, eps=eps)
        worst = torch.maximum(worst, (other - weights).abs() / bound)
    assert 0.2 < worst.max() <= 1
    # Where a gradient is rounding alone, a step of full length is in reach, and nowhere else.
    assert bound[:1000].min() > RATE
    assert bound[-500:].max() < 0.05 * RATE * STEPS


@pytest.mark.parametrize("step", range(STEPS))
def test_one_update_by_another_gradient_is_out_of_reach(step):
    gradients = _gradients(0)
    weights, bound = _train(gradients)
    gradients[step] = -gradients[step]
    other, _ = _train(gradients)
    apart = ((other - weights).abs() / bound)[-500:]
    assert apart.median() > 100


def test_an_optimizer_without_a_bound_of_its_own_gets_none_of_another():
    """Not Muon's, to which it would be compared in silence."""
    p = torch.nn.Parameter(torch.ones(4))
    sgd: Any = torch.optim.SGD([p], lr=RATE, momentum=0.9)
    inner = SimpleNamespace(is_stub_optimizer=False, optimizer=sgd, get_parameters=lambda: [p])
    megatron: Any = SimpleNamespace(chained_optimizers=[inner], param_groups=sgd.param_groups)
    reach = Reach(megatron, OptimizerConfig(), rounding=ROUNDING)
    p.grad = torch.ones(4)
    sgd.step()
    with pytest.raises(NotImplementedError, match="with the states momentum_buffer has no bound"):
        reach.add_update()
    assert not reach.bounds[0].any()
