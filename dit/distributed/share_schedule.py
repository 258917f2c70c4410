"""The device mesh of FSDP, and when its layers gather weights and reduce gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param

from dit.config import DdpConfig, Recompute
from dit.distributed.process_groups import device


def shares_mesh(groups: ProcessGroupCollection) -> DeviceMesh:
    """The mesh of data and context ranks over which weights are sharded.

    `ddp.dp_replicate_size` adds an axis of replicas (HSDP).
    """
    shares, every, kind = groups.intra_dp_cp, groups.dp_cp, device().type
    if shares.size() == every.size():
        return DeviceMesh.from_group(every, kind, mesh_dim_names=("shares",))
    ranks = torch.tensor(dist.get_process_group_ranks(every)).view(-1, shares.size())
    return DeviceMesh.from_group(
        [groups.inter_dist_opt, shares], kind, mesh=ranks, mesh_dim_names=("copies", "shares")
    )


def leave_bytes(fsdp_param: Any = _fsdp_param) -> None:
    """Makes `fully_shard` divide and gather byte weights unchanged, as torch does from 2.12 on.

    torch 2.11 briefly lets each divided weight require a gradient, which is an error for bytes, and
    gathers all weights in the compute dtype. `fsdp_param` is the module of torch that is changed.
    """
    if fsdp_param.nn is not nn:
        return  # torch was changed before, for another part of the network
    wrapped = fsdp_param.FSDPParam.init_dtype_attrs

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    def init_dtype_attrs(weight: Any, policy: MixedPrecisionPolicy) -> None:
        wrapped(weight, policy)
        if not weight.orig_dtype.is_floating_point:
            weight.param_dtype = None

    fsdp_param.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)
    fsdp_param.FSDPParam.init_dtype_attrs = init_dtype_attrs


class ShareSchedule:
    """When the layers of an FSDP network gather weights and reduce gradients."""

    def __init__(self, module: Any, layers: Sequence[Any], options: DdpConfig):
        """Sets the schedule of `module` and its `layers`, after `fully_shard` has wrapped both."""
        self.module, self.layers, self.options = module, layers, options
        self.units = (module, *layers)
        self._reshard(options.reshard_after_forward)
        self._fetch_ahead(options.prefetch_layers)
        for group in (group for unit in self.units for group in _groups(unit)):
            group.post_backward = partial(_reduce_all, group, group.post_backward)
        if options.dp_replicate_size > 1 or not options.reduce_each_pack:
            # Megatron-Core's schedules enter this context for all packs but the last.
            module.config.no_sync_func = self.no_sync

    def _reshard(self, after_forward: bool) -> None:
        for layer in self.layers:
            layer.set_reshard_after_forward(after_forward, recurse=False)

    def _fetch_ahead(self, count: int) -> None:
        """Makes each layer prefetch the weights of the `count` layers that are computed after it.

        The order is the network's, reversed in the backward pass. torch's default, the order of the
        last pass, would be wrong after recomputation and in pipelines.
        """
        self.module.set_modules_to_backward_prefetch([*reversed(self.layers[-count:])])
        for number, layer in enumerate(self.layers):
            before = self.layers[max(0, number - count) : number]
            layer.set_modules_to_backward_prefetch([*reversed(before)])
        # One layer is prefetched anyway, because the host runs ahead of the device. Prefetching
        # more is wrong if several layers are recomputed together: it would fetch layers behind the
        # last of these.
        model = self.module.model
        together = model.recompute_granularity is Recompute.FULL and model.recompute_num_layers > 1
        for number, unit in enumerate(self.units if count > 1 and not together else ()):
            unit.set_modules_to_forward_prefetch([*self.units[number + 1 : number + 1 + count]])

    def gather_once(self) -> None:
        """Joins the all-gathers of another rank's pass without gradients; computes nothing."""
        self.module.unshard()
        for layer in self.layers:
            layer.unshard()
            layer.reshard()

    @contextmanager
    def equal_passes(self) -> Iterator[None]:
        """A context in which each pass gathers all layers anew, as `gather_once` does."""
        self._reshard(True)
        yield
        self._reshard(self.options.reshard_after_forward)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients wait for their reduction over replicas.

        With `ddp.reduce_each_pack=false` they wait for their reduction over any ranks. The first
        backward pass after the context reduces the gradients of all packs.
        """
        self._sum_now(False)
        yield
        self._sum_now(True)
        for unit in () if self.options.reduce_each_pack else self.units:
            _complete(unit)

    def _sum_now(self, now: bool) -> None:
        for unit in self.units:
            if self.options.reduce_each_pack:
                unit.set_requires_all_reduce(now, recurse=False)
            else:
                unit.set_requires_gradient_sync(now, recurse=False)


def _groups(unit: Any) -> list[Any]:
    """The parameter groups of the FSDP2 module `unit`; until torch 2.11 there is at most one."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _trained(group: Any) -> list[Any]:
    return [one for one in group.fsdp_params if one.sharded_param.requires_grad]


def _reduce_all(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Calls `reduce` with zero gradients for unused weights, so that all ranks send equal lengths.

    Packs have different inputs, so ranks use different weights. torch 2.13 has
    `set_reduce_scatter_unused_params` for this.
    """
    for one in _trained(group) if group.reduce_grads else ():
        weight, kept = getattr(one, "_unsharded_param", None), one.unsharded_accumulated_grad
        if weight is not None and weight.grad is None and kept is None:
            weight.grad = torch.zeros_like(weight)
    reduce(*unused)


def _complete(unit: Any) -> None:
    """Adds zero gradients for unused weights of `unit` if others of its weights have gradients.

    torch stores gradients in the dtype of the reduction and demands one dtype in a unit; weights
    that only the last pack leaves unused would get another dtype.
    """
    for group in _groups(unit):
        trained = _trained(group)
        kept = [one.unsharded_accumulated_grad for one in trained]
        like = next((gradient for gradient in kept if gradient is not None), None)
        for one, gradient in zip(trained, kept, strict=True):
            if like is not None and gradient is None:
                one.unsharded_accumulated_grad = like.new_zeros(one._unsharded_param.shape)
