"""Activations that wait on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from dit.config import Problems, Recompute
from dit.models.dit.config import DitConfig
from dit.models.dit.model import DiT
from dit.models.stacks.stack import on_host
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, tiny_model

LARGE = 1 << 15  # numbers, twice as many bytes as stay on the device


@dataclass(frozen=True)
class Shared:
    angle: Tensor


@pytest.mark.parametrize("size", [LARGE, 16], ids=["large", "small"])
def test_activations_are_copied_and_weights_are_not(size):
    layer, shared = nn.Linear(1, size, bias=False), Shared(torch.rand(size))
    x = torch.rand(size, requires_grad=True)
    with on_host(layer, shared):
        h = 2 * x
        loss = (h.sin() * layer.weight[:, 0] * shared.angle).sum()
    expected = 2 * (2 * x.detach()).cos() * layer.weight[:, 0].detach() * shared.angle
    h.data.zero_()  # the device's memory has another use by now
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.allclose(gradient, expected) == (size == LARGE)


def test_weights_and_what_layers_share_stay():
    layer, shared = nn.Linear(1, LARGE, bias=False), Shared(torch.ones(LARGE))
    x = torch.rand(LARGE, requires_grad=True)
    with on_host(layer, shared):
        loss = (x * layer.weight[:, 0] * shared.angle).sum()
    layer.weight.data.zero_()
    assert (torch.autograd.grad(loss, x)[0] == 0).all()


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE])
def test_gradients_are_the_same_to_the_last_bit(groups, recompute):
    model = tiny_model(num_layers=3, recompute_granularity=recompute)
    pack = random_pack([(1, 16, 16), (2, 12, 12)], [9, 30], model=model)
    found = []
    for layers in (0, 2):
        network = DiT(replace(model, cpu_offloading_num_layers=layers), groups).train()
        randomise(network, seed=7)
        out_TC = network(pack.latent_TC, torch.tensor([0.1, -0.3]), pack)
        (out_TC * pack.latent_TC).sum().backward()
        found.append([out_TC.detach(), *(p.grad for p in network.parameters())])
    for plain, offloaded in zip(*found, strict=True):
        assert torch.equal(plain, offloaded)


def test_layers_are_not_offloaded_and_recomputed():
    with pytest.raises(Problems, match="recompute_granularity to none or selective"):
        DitConfig(cpu_offloading_num_layers=2, recompute_granularity=Recompute.FULL)
