"""Activations that wait on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dit.config import Recompute, RecomputeMethod
from dit.models.dit.model import DiT
from dit.models.stacks import offload
from dit.models.stacks.offload import on_host
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
    model, copies = tiny_model(num_layers=3, **changes), _LateCopies()
    monkeypatch.setattr(offload, "_copies", lambda _: copies)
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


class _LateStream:
    """A stream whose copies are made when something waits for them."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.waited_for_compute = 0

    def wait_stream(self, stream: _Compute) -> None:
        assert isinstance(stream, _Compute)
        self.waited_for_compute += 1

    def wait_event(self, event: _Event) -> None:
        self.queue.append(event.wait)

    def record_event(self) -> _Event:
        return _Event(self, len(self.queue))


@dataclass(frozen=True)
class _Event:
    stream: _LateStream
    count: int

    def wait(self) -> None:
        while self.stream.done < self.count:
            self.stream.done += 1
            self.stream.queue[self.stream.done - 1]()


class _Compute:
    """The stream of kernels, which run at once."""

    def wait_event(self, event: _Event) -> None:
        event.wait()


class _Later(TorchDispatchMode):
    """Inside, copies are queued on a stream, and new memory holds NaN."""

    def __init__(self, stream: _LateStream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.stream.queue.append(lambda: args[0].copy_(args[1]))
            return args[0]
        made = func(*args, **(kwargs or {}))
        return made.fill_(torch.nan) if made.is_floating_point() else made


class _LateCopies(offload.StreamCopies):
    def __init__(self) -> None:
        self.compute = _Compute()
        cuda = SimpleNamespace(
            Stream=_LateStream, stream=_Later, current_stream=lambda: self.compute
        )
        super().__init__(cuda)
        self.log: list[str] = []
        self.held = {"out": 0, "compute": 0}

    def _pinned(self, kept: Tensor) -> Tensor:
        return torch.full_like(kept, torch.nan)

    def _used_by(self, tensor: Tensor, stream: object) -> None:
        self.held["out" if stream is self.out else "compute"] += 1

    def to_host(self, kept):
        self.log.append("leave")
        return super().to_host(kept)

    def to_device(self, home, **options):
        self.log.append("return")
        return super().to_device(home, **options)

    def wait(self, back, arrival):
        self.log.append("wait")
        super().wait(back, arrival)
