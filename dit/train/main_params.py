"""What this rank's optimizer updates, and whole weights from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MainParamShard:
    """The part of one weight that this rank's optimizer updates, in float32."""

    weight: torch.nn.Parameter  # in the model; this rank's part under tensor parallelism
    value: Tensor
    part: slice  # of the flattened weight


def main_param_shards(optimizer: MegatronOptimizer) -> list[MainParamShard]:
    """What this rank's optimizer updates, in a fixed order."""
    return [shard for inner in _inner(optimizer) for shard in _main_shards(inner)]


def _inner(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return optimizer.chained_optimizers  # type: ignore[attr-defined]


def _main_shards(inner: MegatronOptimizer) -> Iterator[MainParamShard]:
    if isinstance(inner, DistributedOptimizer):
        groups = inner.optimizer.param_groups
        for weight, (group, order) in inner.model_param_group_index_map.items():
            part = inner._get_model_param_range_map(weight)["param"]
            yield MainParamShard(
                weight, groups[group]["params"][order], slice(part.start, part.end)
            )
        return
    copies = {}
    if isinstance(inner, Float16OptimizerWithFloat16Params):
        halves, wholes = chain(*inner.float16_groups), chain(*inner.fp32_from_float16_groups)
        copies = {whole: half for half, whole in zip(halves, wholes, strict=True)}
    for value in inner.get_parameters():
        yield MainParamShard(copies.get(value, value), value, slice(0, value.numel()))


def joined(
    optimizer: MegatronOptimizer,
    values: Sequence[Tensor],
    model: dict[str, Any],
    *,
    data_ranks: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Values beside the main shards, in their order, as float32 tensors in the shape of weights.

    `model` is the sharded state of one chunk. Collective: every data rank gives its parts.
    """
    sharded = any(isinstance(inner, DistributedOptimizer) for inner in _inner(optimizer))
    parts: dict[Tensor, tuple[slice, Tensor]] = {
        shard.weight: (shard.part, value)
        for shard, value in zip(main_param_shards(optimizer), values, strict=True)
    }
    wholes = {}
    for name, entry in model.items():
        if not isinstance(entry, ShardedTensor) or entry.data is None:
            continue
        whole = torch.zeros(entry.data.numel(), device=entry.data.device)
        if entry.data in parts:
            part, value = parts[entry.data]
            whole[part] = value.flatten()
        if sharded:
            dist.all_reduce(whole, group=data_ranks)  # of each, the others hold zeros
        wholes[name] = whole.view(entry.data.shape)
    return wholes
