"""A router weighs experts: a known answer, Diffusers' numbers and gradients, tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch import Tensor

from dit.models.hidream.experts import Experts
from dit.models.hidream.family import FeedExperts
from dit.models.layer_spec import TOKENS, Activation, FeedForwardSpec, Port
from dit.models.layers.parallel_linear import BuildContext, transformer_config
from dit.models.registry import family_named

WIDTH, COUNT = 12, 4


def experts(groups: Any, *, chosen: int, hidden: tuple[int, int] = (256, 256)) -> Experts:
    config: Any = family_named("hidream").config
    model = config(hidden_size=WIDTH, num_attention_heads=2, rope_axes=(2, 2, 2), precision="fp32")
    expert, shared = (
        FeedForwardSpec(width=WIDTH, hidden=one, activation=Activation.SWIGLU) for one in hidden
    )
    part = FeedExperts(Port(TOKENS, "mlp"), expert, shared, count=COUNT, chosen=chosen)
    context = BuildContext(model=model, config=transformer_config(model), groups=groups)
    return Experts(context, part)


def test_known_weights(groups) -> None:
    """Probabilities of all four, of which the two largest count as they are, without a sum of 1."""
    made = experts(groups, chosen=2)
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[:, 0] = torch.tensor([1.0, 2.0, 4.0, 1.0]).log()
    x_TD = torch.zeros(2, WIDTH)
    x_TD[0, 0], x_TD[1, 0] = 1.0, -1.0
    found_TE = made.weights(x_TD)
    torch.testing.assert_close(found_TE[0], torch.tensor([0.0, 0.25, 0.5, 0.0]))
    # The other way round, 4/11 each for the first and the last.
    torch.testing.assert_close(found_TE[1], torch.tensor([4.0, 0.0, 0.0, 4.0]) / 11)


def test_outputs_and_gradients_are_those_of_diffusers(groups) -> None:
    rng = torch.Generator().manual_seed(0)
    theirs: Any = MOEFeedForwardSwiGLU(WIDTH, 4 * WIDTH, COUNT, 2).train()
    ours = experts(groups, chosen=2)
    x_TD = torch.randn(30, WIDTH, generator=rng)
    given = {"shared": theirs.shared_experts} | {
        f"expert_{n}": one for n, one in enumerate(theirs.experts)
    }
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng) * weight.shape[1] ** -0.5)
        ours.router.weight.copy_(theirs.gate.weight)
        for name, one in given.items():
            own: Any = getattr(ours, name)
            own.linear_fc1.weight.copy_(_by_turns(one.w1.weight, one.w3.weight))
            own.linear_fc2.weight.copy_(one.w2.weight)
    made, wanted = ours(x_TD), theirs(x_TD[None])[0]
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    slope = torch.randn(made.shape, generator=rng)
    (made * slope).sum().backward()
    (wanted * slope).sum().backward()
    pairs = [(ours.router.weight.grad, theirs.gate.weight.grad)]
    for name, one in given.items():
        own = getattr(ours, name)
        first = _by_turns(one.w1.weight.grad, one.w3.weight.grad)
        pairs += [(own.linear_fc1.weight.grad, first)]
        pairs += [(own.linear_fc2.weight.grad, one.w2.weight.grad)]
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def _by_turns(gates: Tensor, values: Tensor) -> Tensor:
    return torch.stack((gates, values), dim=1).flatten(0, 1)
