"""Activations that wait on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import pytest
import torch
from torch import Tensor, nn

from dit.config import Recompute, RecomputeMethod
from dit.models.dit.model import DiT
from dit.models.stacks import offload
from dit.models.stacks.offload import on_host
from dit.train.model_and_optimizer import randomise
from tests.late_copies import LateCopies
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


RECOMPUTED = [
    {},
    {"recompute_granularity": Recompute.SELECTIVE},
    {"recompute_granularity": Recompute.FULL},
    {"recompute_granularity": Recompute.FULL, "recompute_method": RecomputeMethod.BLOCK},
]
IDS = ["none", "selective", "full", "block"]


def _numbers(groups, model, layers):
    pack = random_pack([(1, 16, 16), (2, 12, 12)], [9, 30], model=model)
    network = DiT(replace(model, cpu_offloading_num_layers=layers), groups).train()
    randomise(network, seed=7)
    out_TC = network(pack.latent_TC, torch.tensor([0.1, -0.3]), pack)
    (out_TC * pack.latent_TC).sum().backward()
    return [out_TC.detach(), *(p.grad for p in network.parameters())]


@pytest.mark.parametrize("changes", RECOMPUTED, ids=IDS)
def test_gradients_are_the_same_to_the_last_bit(groups, changes):
    model = tiny_model(num_layers=3, **changes)
    for plain, offloaded in zip(*(_numbers(groups, model, n) for n in (0, 2)), strict=True):
        assert torch.equal(plain, offloaded)


@pytest.mark.parametrize("changes", RECOMPUTED, ids=IDS)
def test_copies_on_their_own_streams_are_waited_for_and_begun_a_layer_ahead(
    groups, monkeypatch, changes
):
    """Copies are made as late as the order of the streams allows: what waits for too little
    computes with NaN.
    """
    model, copies = tiny_model(num_layers=3, **changes), LateCopies()
    monkeypatch.setattr(offload, "copies_of", lambda _: copies)
    for plain, offloaded in zip(*(_numbers(groups, model, n) for n in (0, 2)), strict=True):
        assert torch.equal(plain, offloaded)
    order = [(what, len(list(same))) for what, same in groupby(copies.log)]
    kinds = [what for what, _ in order]
    # Both layers leave; the last of them comes back when the third is reached, the first when the
    # last is, before anything waits for that.
    full = changes.get("recompute_granularity") is Recompute.FULL
    assert kinds == ["leave", "return", "wait"]
    (_, left), (_, returned), (_, waited) = order
    assert left == returned == waited
    assert (left == 2) == (full and "recompute_method" not in changes)
    assert copies.held == {"out": left, "compute": left}
    assert copies.out.waited_for_compute == left
