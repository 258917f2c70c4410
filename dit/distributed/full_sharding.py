"""Data parallelism with sharded weights: torch's FSDP2 under Megatron-Core's schedule.

Between passes a data rank has some rows of each weight (its shard). Rows of trained weights are
float32: the main parameters, which the optimizer updates. In a pass each layer gathers its weights
in the compute dtype, and frees them afterwards; embedders and head stay gathered for the whole
pass.

1. ShardedChunk    a model chunk with the interface that Megatron-Core's schedule,
                   `finalize_model_grads` and optimizer expect
2. RowsOptimizer   Megatron-Core's optimizer of float32 weights, for rows of weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dit.config import DdpConfig
from dit.distributed.process_groups import device
from dit.distributed.row_shares import RowShares, mark_rows, packing_of
from dit.distributed.watchdog import heartbeat

_STORED = "stored_in_shares"
"""Attribute of a network with FSDP: the entries that Megatron-Core stores for this rank's rows."""


def stored_of(module: nn.Module) -> list[Any] | None:
    """Entries of the sharded state dict for this rank's rows of the network `module`.

    None for a network without FSDP. Megatron-Core itself would mistake the rows for whole weights.
    """
    return getattr(module, _STORED, None)


class RowsOptimizer(FP32Optimizer):
    """Megatron-Core's optimizer of float32 weights, for this rank's rows of each weight."""


def over_rows(optimizer: MegatronOptimizer, groups: ProcessGroupCollection) -> None:
    """Turns each optimizer that is chained in `optimizer` into `RowsOptimizer`, in place.

    Empty rows are dropped, and the norm of the gradient becomes a sum over the ranks that share one
    copy of the weights.
    """
    for inner in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        assert type(inner) is FP32Optimizer
        inner.__class__ = RowsOptimizer
        # Squares of all rows of one copy make the norm.
        inner.grad_stats_parallel_group = groups.intra_dist_opt
        # Transformer Engine and Apex start a kernel where the last tensor of a list ends
        # (multi_tensor_apply.cuh): if that is empty, they leave out those before it.
        for group in inner.param_groups:
            group["params"] = [own for own in group["params"] if own.numel()]


class ShardedChunk(MegatronModule):
    """A model chunk whose weights are sharded over the data ranks (FSDP2)."""

    def __init__(
        self,
        module: Any,
        ddp_config: DistributedDataParallelConfig,
        groups: ProcessGroupCollection,
        options: DdpConfig,
    ):
        super().__init__(config=module.config)
        self.module: Any = module
        self.ddp_config = ddp_config
        stored, whole = [*module.sharded_state_dict().values()], dict(module.named_parameters())
        layers = [layer for stack in module.stacks.values() for layer in stack.layers]
        self._shard(module, layers, groups)
        from dit.distributed.share_schedule import ShareSchedule

        self._schedule = ShareSchedule(module, layers, options)
        # While a layer is gathered, it has other parameters than these.
        self._weights: dict[str, Any] = dict(module.named_parameters())
        self._ranks = groups.intra_dp_cp
        ranks, rank = self._ranks.size(), self._ranks.rank()
        self._rows: dict[str, nn.Parameter] = {}
        self._kept: dict[nn.Parameter, Tensor] = {}  # masks of gradients
        for name, weight in self._weights.items():
            own = nn.Parameter(_local(weight.detach()), requires_grad=weight.requires_grad)
            vars(own).update(_marks(whole[name]))
            shape, dtype = whole[name].shape, whole[name].dtype
            rows = RowShares(shape=shape, dtype=dtype, ranks=ranks, rank=rank)
            mark_rows(own, rows)
            self._rows[name] = own
            if (kept := _kept(whole[name])) is not None:
                self._kept[own] = kept[rows.part].view_as(own)
        own_of: dict[Any, nn.Parameter] = {whole[n]: own for n, own in self._rows.items()}
        setattr(module, _STORED, [_with_rows(entry, own_of) for entry in stored])

    def _shard(self, module: Any, layers: Sequence[Any], groups: ProcessGroupCollection) -> None:
        from dit.distributed.share_schedule import leave_bytes, shares_mesh

        mesh, policy = shares_mesh(groups), _policy(module, self.ddp_config)
        self._reduced = policy.reduce_dtype or torch.float32
        if torch.__version__ < "2.12":
            leave_bytes()
        for unit in (*layers, module):
            _give_memory(unit)
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        for unit in (module, *layers):
            # A sum, which `finalize_model_grads` divides by the tokens of all ranks.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    # Methods that Megatron-Core's optimizer and `finalize_model_grads` call.

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, rows) of each weight on this rank."""
        return ((f"module.{name}", own) for name, own in self._rows.items())

    def parameters(self, *_: Any, **__: Any) -> Iterator[nn.Parameter]:
        return iter(self._rows.values())

    def _trained(self) -> Iterator[tuple[Any, nn.Parameter]]:
        return ((self._weights[n], own) for n, own in self._rows.items() if own.requires_grad)

    def finish_grad_sync(self, **_: Any) -> None:
        """Sets the gradients of this rank's rows to those that passes have reduced over ranks."""
        for weight, own in self._trained():
            own.grad = torch.zeros_like(own) if weight.grad is None else _local(weight.grad)
            if own in self._kept:
                own.grad *= self._kept[own]

    def gradients(self) -> list[Tensor]:
        """Gradients of this rank's rows, for weights that have a gradient at the moment."""
        return [own.grad for _, own in self._trained() if own.grad is not None]

    @property
    def gradient_types(self) -> set[torch.dtype]:
        """Dtypes of the reduced gradients, and of the gradients that ranks send."""
        return {torch.float32, self._reduced}

    def scale_gradients(self, scaling_factor: float) -> None:
        for gradient in self.gradients():
            gradient *= scaling_factor

    def zero_grad_buffer(self) -> None:
        for weight, own in self._trained():
            own.grad = weight.grad = None

    def start_param_sync(self, **_: Any) -> None:
        """Frees weights that a pass without gradients left gathered: their rows have changed."""
        self.module.reshard()

    # Passes that only some data ranks make.

    @contextmanager
    def in_company(self) -> Iterator[None]:
        """A context in which data ranks may run different numbers of passes without gradients.

        A rank that has finished joins the all-gathers of the other ranks until all have finished.
        All data ranks enter the context with the same weights. After an error it does not wait,
        because the error may be one rank's alone.
        """
        announced = self.module.register_forward_pre_hook(self._say_pass, prepend=True)
        with self._schedule.equal_passes():
            yield
            announced.remove()
            while self._announce(0).item():
                heartbeat("passes of other ranks")
                self._schedule.gather_once()
        self.start_param_sync()

    def _say_pass(self, *_: Any) -> None:
        self._announce(1)

    def _announce(self, passes: int) -> Tensor:
        """Maximum of `passes` over all data ranks [1]: above 0 if any rank has a pack now."""
        any_rank = torch.tensor([passes], device=device())
        dist.all_reduce(any_rank, op=dist.ReduceOp.MAX, group=self._ranks)
        return any_rank


class _WithoutMemory(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": torch.device("meta")}
        return func(*args, **(kwargs or {}))


def without_memory() -> TorchFunctionMode:
    """A context in which new modules allocate no weights; `ShardedChunk` allocates them."""
    return _WithoutMemory()


def _give_memory(unit: nn.Module) -> None:
    """Allocates the weights of the layer `unit` on the device, uninitialised, for FSDP to shard.

    Trained weights are float32, because their rows are the main parameters.
    """
    for module in unit.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if not isinstance(weight, DTensor):
                dtype = torch.float32 if weight.requires_grad else weight.dtype
                shape = weight.shape
                if (packed := packing_of(weight)) is not None:
                    shape, dtype = packed.shape(shape), torch.uint8
                made = torch.empty(shape, dtype=dtype, device=device())
                setattr(module, name, nn.Parameter(made, requires_grad=weight.requires_grad))


def _marks(weight: nn.Parameter) -> dict[str, Any]:
    return vars(weight)


def _kept(weight: nn.Parameter) -> Tensor | None:
    """Flat mask (1 or 0) for a weight's gradient, computed from its hooks; None without hooks.

    `fully_shard` creates new parameters, which lose hooks such as that of `hold_key_bias`.
    """
    if not weight._backward_hooks:
        return None
    kept: Any = torch.ones(weight.shape, device=device())
    for hook in weight._backward_hooks.values():
        kept = hook(kept)
    return kept.flatten()


def _local(weight: Any) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _with_rows(entry: Any, own_of: dict[Tensor, nn.Parameter]) -> Any:
    if not isinstance(entry, ShardedTensor) or entry.data not in own_of:
        return entry  # also tables of a network that are not weights
    own, entry = own_of[entry.data], replace(entry, data=None)  # type: ignore[index]
    entry.data = own  # set last: `replace` would refuse rows, which are smaller and in float32
    return entry


def _policy(module: nn.Module, ddp: DistributedDataParallelConfig) -> MixedPrecisionPolicy:
    types = {weight.dtype for weight in module.parameters() if weight.requires_grad}
    assert len(types) <= 1, f"weights of several types are trained: {types}"
    compute = next(iter(types), None)
    return MixedPrecisionPolicy(
        # float32 here would widen frozen weights as well.
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32 if ddp.grad_reduce_in_fp32 else compute,
        cast_forward_inputs=False,  # noise levels are float32
    )
