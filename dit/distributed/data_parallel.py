"""Data parallelism: Megatron-Core's DDP, with or without its distributed optimizer.

This is the only module that knows how gradients are summed over data ranks and which rank holds
which part of the float32 main parameters. Another way (FSDP) would stand beside it with the same
functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.config import RunConfig

ModelChunk = DistributedDataParallel
"""A part of the model on this rank, wrapped; there is one for each virtual pipeline stage."""


def wrap(
    models: Sequence[MegatronModule], config: RunConfig, groups: ProcessGroupCollection
) -> list[ModelChunk]:
    """Wraps the parts of the model on this rank, so that gradients are summed over data ranks."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=config.ddp.overlap_grad_reduce,
        overlap_param_gather=config.ddp.overlap_param_gather,
        use_distributed_optimizer=config.ddp.use_distributed_optimizer,
        bucket_size=config.ddp.bucket_size,
        average_in_collective=False,  # gradients are sums until divided by the global token count
        check_for_nan_in_grad=False,  # it raises on one rank only; the step looks at the norm
    )
    chunks = [
        DistributedDataParallel(
            config=model.config,
            ddp_config=ddp,
            module=model,
            pg_collection=groups,
            # Later chunks have no work left behind which a gather of their weights could hide.
            disable_bucketing=index > 0,
        )
        for index, model in enumerate(models)
    ]
    if config.ddp.overlap_grad_reduce:
        no_syncs: Any = [chunk.no_sync for chunk in chunks]
        # Megatron-Core's schedules look at the first chunk's configuration.
        chunks[0].config.no_sync_func = no_syncs if len(chunks) > 1 else no_syncs[0]
    return chunks


def zero_gradients(chunks: Sequence[ModelChunk], optimizer: MegatronOptimizer) -> None:
    """Clears the gradients of the model and of the main parameters."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def gradient_buffers(chunks: Sequence[ModelChunk]) -> list[Tensor]:
    """The buffers in which gradients are accumulated and reduced."""
    wrapped: list[Any] = [*chunks]
    return [buffer.grad_data for chunk in wrapped for buffer in chunk.buffers]


def is_sharded(chunks: Sequence[ModelChunk]) -> bool:
    """Whether data ranks update different parts of each weight; otherwise all update all of it."""
    return chunks[0].ddp_config.use_distributed_optimizer


@contextmanager
def gathered_weights(chunks: Sequence[ModelChunk]) -> Iterator[None]:
    """Inside, the weights are complete on every rank and no gather of them is under way.

    With `ddp.overlap_param_gather` each forward pass gathers the weights that the last step updated
    on other ranks. Ranks that save, or that validate fewer packs than others, must not wait for a
    gather that the others never begin.
    """
    overlapped = chunks[0].ddp_config.overlap_param_gather
    for chunk in chunks if overlapped else ():
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in chunks if overlapped else ():
        chunk.enable_forward_pre_hook()


def publish_main_params(optimizer: MegatronOptimizer, chunks: Sequence[ModelChunk]) -> None:
    """Copies the main parameters to the model's weights, on all data ranks."""
    for inner in chained_optimizers(optimizer):
        if not isinstance(inner, FP32Optimizer):  # it shares its memory with the weights
            inner._copy_main_params_to_model_params()
    if is_sharded(chunks):
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def chained_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron-Core chains into one."""
    return optimizer.chained_optimizers  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class MainParamShard:
    """The part of one weight that this rank's optimizer updates, in float32."""

    weight: torch.nn.Parameter  # in the model; this rank's part under tensor parallelism
    value: Tensor
    part: slice  # of the flattened weight


def main_param_shards(optimizer: MegatronOptimizer) -> list[MainParamShard]:
    """All main parameters that this rank's optimizer updates, in a fixed order."""
    return [shard for inner in chained_optimizers(optimizer) for shard in _shards(inner)]


def _shards(inner: MegatronOptimizer) -> Iterator[MainParamShard]:
    if isinstance(inner, DistributedOptimizer):
        groups = inner.optimizer.param_groups
        for weight, (group, order) in inner.model_param_group_index_map.items():
            part = inner._get_model_param_range_map(weight)["param"]
            yield MainParamShard(
                weight, groups[group]["params"][order], slice(part.start, part.end)
            )
        return
    weights = {}  # float32 copy -> weight of the model
    if isinstance(inner, Float16OptimizerWithFloat16Params):
        halves, copies = chain(*inner.float16_groups), chain(*inner.fp32_from_float16_groups)
        weights = {copy: half for half, copy in zip(halves, copies, strict=True)}
    for value in inner.get_parameters():
        yield MainParamShard(weights.get(value, value), value, slice(0, value.numel()))


def unshard(
    optimizer: MegatronOptimizer,
    values: Sequence[Tensor],
    model: dict[str, Any],
    *,
    data_ranks: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Joins values that belong to the main parameters to float32 tensors in the shape of weights.

    `values` are in the order of `main_param_shards`; `model` is the sharded state of one chunk.
    Collective: every data rank gives its parts.
    """
    sharded = any(
        isinstance(inner, DistributedOptimizer) for inner in chained_optimizers(optimizer)
    )
    parts: dict[Tensor, tuple[slice, Tensor]] = {
        shard.weight: (shard.part, value)
        for shard, value in zip(main_param_shards(optimizer), values, strict=True)
    }
    tensors = {}
    for name, entry in model.items():
        if not isinstance(entry, ShardedTensor) or entry.data is None:
            continue
        full = torch.zeros(entry.data.numel(), device=entry.data.device)
        if entry.data in parts:
            part, value = parts[entry.data]
            full[part] = value.flatten()
        if sharded:
            dist.all_reduce(full, group=data_ranks)  # every rank holds zeros outside of its part
        tensors[name] = full.view(entry.data.shape)
    return tensors
