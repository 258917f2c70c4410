from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dit.distributed import full_sharding


def test_bytes_are_cut_and_gathered_as_bytes_with_torch_2_11() -> None:
    """In a stand-in of torch's module, with what 2.11 does to the type of a weight."""

    class FSDPParam(SimpleNamespace):
        def init_dtype_attrs(self, policy: MixedPrecisionPolicy) -> None:
            self.orig_dtype = self.sharded_param.dtype
            same = policy.param_dtype == self.orig_dtype
            self.param_dtype = None if same else policy.param_dtype

    module: Any = ModuleType("_fsdp_param")
    vars(module).update(nn=nn, FSDPParam=FSDPParam)
    full_sharding._leave_bytes(module)
    made = module.nn
    full_sharding._leave_bytes(module)  # for each part of a network
    assert module.nn is made
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for dtype, gathered in ((torch.uint8, None), (torch.float32, torch.bfloat16)):
        own = module.nn.Parameter(torch.zeros(2, dtype=dtype))
        assert isinstance(own, nn.Parameter) and own.requires_grad == dtype.is_floating_point
        weight = FSDPParam(sharded_param=own)
        weight.init_dtype_attrs(policy)
        assert weight.param_dtype == gathered
    assert not module.nn.Parameter(torch.zeros(2), requires_grad=False).requires_grad
