"""Optimizer states of each weight and of each parameter group, in the form of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.config.training import MOMENTS
from dit.distributed.data_parallel import every_optimizer, main_param_shards_of
from dit.distributed.full_sharding import RowsOptimizer

_MAIN_PARAM = {
    DistributedOptimizer: "param",
    RowsOptimizer: "param",
    Float16OptimizerWithFloat16Params: "fp32_param",
}
"""Megatron-Core's name of the main parameters in a checkpoint, by class of the optimizer."""


def optimizer_values(optimizer: MegatronOptimizer, names: Sequence[str]) -> dict[str, list[Tensor]]:
    """The states of each main parameter of this rank, by name prefix in a checkpoint.

    `names` are the states in `OptimizerConfig.states`. The tensors are in the order of
    `main_param_shards`; they include the main parameters themselves, unless these are the weights
    of the model. All ranks have the same prefixes, even those without a parameter.
    """
    values: dict[str, list[Tensor]] = {}
    for inner in every_optimizer(optimizer):
        main = _MAIN_PARAM.get(type(inner))
        shards = [] if inner.is_stub_optimizer else list(main_param_shards_of(inner))
        if main is not None:
            values.setdefault(state_prefix(main), []).extend(shard.value for shard in shards)
        for name in names:
            states = _states(inner, [shard.value for shard in shards], name)
            values[state_prefix(name)] = [*values.get(state_prefix(name), ()), *states]
    return values


def _states(inner: Any, params: Sequence[Tensor], name: str) -> list[Tensor]:
    """The state `name` of each of `params`, in float32 even if the optimizer stores fewer bits.

    It is an empty tensor for a parameter of which the optimizer has no such state.
    """
    if inner.config.use_precision_aware_optimizer:
        return [inner.optimizer.get_unscaled_state(p, name) for p in params]
    states = inner.optimizer.state
    return [states[p][name] if name in states[p] else p.new_empty(0) for p in params]


_KEPT = "optimizer_states"
"""Attribute of a weight whose optimizer states in checkpoints differ from most weights'."""


def keep_states(weight: Tensor, names: Sequence[str]) -> None:
    """Records that checkpoints store only the optimizer states `names` of `weight`."""
    setattr(weight, _KEPT, frozenset(map(state_prefix, names)))


def has_state(weight: Tensor, prefix: str) -> bool:
    """Whether checkpoints store the state `prefix` of `weight`; by default they do."""
    kept = getattr(weight, _KEPT, None)
    return kept is None or prefix in kept or prefix not in map(state_prefix, MOMENTS)


def drop_other_states(inner: Any) -> None:
    """Frees states of the optimizer `inner` that checkpoints do not store."""
    for shard in main_param_shards_of(inner):
        state = inner.optimizer.state[shard.value]
        for name in [name for name in state if not has_state(shard.weight, state_prefix(name))]:
            del state[name]


def state_of(optimizer: MegatronOptimizer, value: Tensor | None) -> Mapping[str, Tensor]:
    """The optimizer's states of the main parameter `value` of this rank, by name."""
    found = (inner.optimizer.state for inner in every_optimizer(optimizer))
    return next(states[value] for states in found if value in states)


def state_prefix(name: str) -> str:
    """The prefix that the optimizer's state `name` adds to names of weights in a checkpoint.

    `state_prefix("exp_avg")` is `optimizer.state.exp_avg.`.
    """
    return f"optimizer.state.{name}."


_SHARDING = "fully_reshardable"
"""Megatron-Core's name for optimizer state that is stored in the shape of the weights."""
# The keys by which Megatron-Core tells parameter groups apart.
_GROUP = ("wd_mult", "lr_mult")


def optimizer_groups(
    optimizer: MegatronOptimizer, groups: ProcessGroupCollection
) -> dict[str, Any]:
    """The parameter groups of the optimizer for a checkpoint, without the parameters themselves.

    All ranks call it: a pipeline stage may lack a group, or train nothing at all.
    """
    own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    of_stages = [own] * groups.pp.size()
    if groups.pp.size() > 1:
        dist.all_gather_object(of_stages, own, group=groups.pp)
    every = {tuple(g[key] for key in _GROUP): g for of_stage in of_stages for g in of_stage}
    stored: dict[str, Any] = {"optimizer": {"param_groups": list(every.values())}}
    shared_out = DistributedOptimizer | RowsOptimizer
    if any(isinstance(inner, shared_out) for inner in every_optimizer(optimizer)):
        stored["param_state_sharding_type"] = _SHARDING
    return stored


def load_optimizer_groups(optimizer: MegatronOptimizer, stored: Mapping[str, Any]) -> None:
    """Restores the number of updates from `stored`, the groups in a checkpoint.

    All other entries of a group are settings, which come from the run's configuration.
    """
    updates = updates_made(stored.get("optimizer", stored)["param_groups"])
    for group in optimizer.param_groups:
        group["step"] = updates


def updates_made(groups: Sequence[Mapping[str, Any]]) -> int:
    """The number of updates: the largest count of any of `groups`.

    Transformer Engine's AdamW does not count for a group that has no weight on its rank.
    """
    return max((int(group.get("step", 0)) for group in groups), default=0)
