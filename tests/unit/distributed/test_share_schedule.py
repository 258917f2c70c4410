"""Weights in shares, as one process sees them; `tests/distributed` has several."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dit.config import DdpConfig, Recompute
from dit.distributed.share_schedule import ShareSchedule, leave_bytes


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


def test_bytes_are_cut_and_gathered_as_bytes_with_torch_2_11() -> None:
    """In a stand-in of torch's module, with what 2.11 does to the type of a weight."""

    class FSDPParam(SimpleNamespace):
        def init_dtype_attrs(self, policy: MixedPrecisionPolicy) -> None:
            self.orig_dtype = self.sharded_param.dtype
            same = policy.param_dtype == self.orig_dtype
            self.param_dtype = None if same else policy.param_dtype

    module: Any = ModuleType("_fsdp_param")
    vars(module).update(nn=nn, FSDPParam=FSDPParam)
    leave_bytes(module)
    made = module.nn
    leave_bytes(module)  # for each part of a network
    assert module.nn is made
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for dtype, gathered in ((torch.uint8, None), (torch.float32, torch.bfloat16)):
        own = module.nn.Parameter(torch.zeros(2, dtype=dtype))
        assert isinstance(own, nn.Parameter) and own.requires_grad == dtype.is_floating_point
        weight = FSDPParam(sharded_param=own)
        weight.init_dtype_attrs(policy)
        assert weight.param_dtype == gathered
    assert not module.nn.Parameter(torch.zeros(2), requires_grad=False).requires_grad
