"""Weights in shares, as one process sees them; `tests/distributed` has several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dit.config import DdpConfig, Recompute
from dit.distributed.share_schedule import ShareSchedule


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.model = SimpleNamespace(recompute_granularity=Recompute.NONE, recompute_num_layers=1)

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.used(x_TI)


def test_weights_that_a_pack_does_not_use_are_summed_too(groups):
    """Other ranks' packs may use them, and all ranks send equally many numbers."""
    network: Any = fully_shard(_Network(), mesh=DeviceMesh.from_group(groups.dp_cp, "cpu"))
    ShareSchedule(network, [], DdpConfig())
    for _ in range(2):
        network(torch.ones(2, 3)).sum().backward()
    assert network.used.weight.grad.to_local().any()
    assert not network.unused.weight.grad.to_local().any()
    assert network.frozen.weight.grad is None
