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
    # Both layers leave, and each is waited for when the next has been computed. The last of them
    # comes back when the third is reached, the first when the last is, before anything waits.
    full = changes.get("recompute_granularity") is Recompute.FULL
    assert kinds == ["leave", "wait", "overwrite", "wait"]
    (_, left), (_, gone), (_, returned), (_, waited) = order
    assert left == gone == returned <= waited
    assert (left == 2) == (full and "recompute_method" not in changes)
    assert copies.out.waited_for_compute == copies.back.waited_for_compute == left


@pytest.mark.parametrize("changes", [RECOMPUTED[0], RECOMPUTED[2]], ids=["none", "full"])
def test_two_layers_of_activations_at_most_are_on_the_device(groups, monkeypatch, changes):
    model, copies = tiny_model(num_layers=6, **changes), LateCopies()
    monkeypatch.setattr(offload, "copies_of", lambda _: copies)
    _numbers(groups, model, 5)
    layer = sum(size for _, size in copies.of_activations) / 10  # each leaves and comes back
    row = copies.of_activations[0][1]  # what goes into the first layer, which its caller sees, too
    assert max(copies.living) <= 2 * layer + row
    assert copies.living_bytes() == 0


def test_what_no_layer_follows_stays_for_its_backward_pass(groups, monkeypatch):
    model, copies = tiny_model(num_layers=2, recompute_granularity=Recompute.FULL), LateCopies()
    monkeypatch.setattr(offload, "copies_of", lambda _: copies)
    for plain, offloaded in zip(*(_numbers(groups, model, n) for n in (0, 2)), strict=True):
        assert torch.equal(plain, offloaded)
    # The first layer is gone when the second has been computed, which only then is waited for.
    assert copies.log == ["leave", "leave", "wait", "stay", "overwrite", "wait", "wait"]
    assert copies.living_bytes() == 0


def _products(row: Tensor) -> Tensor:
    """Keeps three views of a row, beside the row."""
    q, k, v = row.split(row.shape[-1] // 3, dim=-1)
    return (q * k).sum() + (v * v).sum() + row.sin().sum()


def test_views_of_the_same_memory_move_once_and_keep_their_strides(monkeypatch):
    copies = LateCopies()
    monkeypatch.setattr(offload, "copies_of", lambda _: copies)
    x = torch.rand(LARGE // 4, 12, requires_grad=True)
    seen = []
    with on_host(nn.Identity(), None):
        row = x * 1
        loss = _products(row)
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[0][0]
    seen = [node._saved_self, node._saved_other]
    assert [one.stride() for one in seen] == [(12, 1)] * 2
    assert torch.equal(seen[1], row.detach()[:, 4:8])
    del row
    assert torch.equal(*(torch.autograd.grad(f, x)[0] for f in (loss, _products(x * 1))))
    assert copies.log.count("leave") == copies.log.count("overwrite") == 1
    assert sum(size for _, size in copies.of_activations) == 2 * x.nbytes


def test_memory_that_is_being_filled_has_no_other_use(monkeypatch):
    """A backward pass may end before it asks for what was fetched for it."""
    copies = LateCopies()
    monkeypatch.setattr(offload, "copies_of", lambda _: copies)
    x = torch.rand(LARGE, requires_grad=True)
    with on_host(nn.Identity(), None) as layer:
        loss = (x * 1).sin().sum()
    for _ in range(2):
        offload.settle(x)
    layer.fetch()
    del loss, layer
    copies.compute.wait_event(copies.back.record_event())
    for _ in range(2):
        offload.settle(x)
    assert copies.living_bytes() == 0
