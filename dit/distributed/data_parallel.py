"""Data parallelism: Megatron-Core's DDP with or without its distributed optimizer, or FSDP2.

Only this module and `full_sharding` (FSDP2) know how gradients are reduced over data ranks, and
which rank has which shard of the float32 main parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.config import DdpConfig, Sharding
from dit.distributed.full_sharding import ShardedChunk
from dit.distributed.row_shares import rows_of

# Hides a warning of Megatron-Core from 0.19 on: that it computes the layout of buffers by itself.
logging.getLogger("megatron.core.distributed.distributed_data_parallel").setLevel(logging.ERROR)

ModelChunk = DistributedDataParallel | ShardedChunk
"""The part of the model in one virtual pipeline stage on this rank, wrapped for data
parallelism."""


def wrap(
    models: Sequence[MegatronModule], ddp: DdpConfig, groups: ProcessGroupCollection
) -> list[ModelChunk]:
    """Wraps `models` so that their gradients are reduced over data ranks."""
    wrapped = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        num_distributed_optimizer_instances=ddp.dp_replicate_size,
        bucket_size=ddp.bucket_size,
        average_in_collective=False,  # gradients are sums until divided by the global token count
        check_for_nan_in_grad=False,  # it raises on one rank only; the step looks at the norm
    )
    if ddp.sharding is Sharding.WEIGHTS:
        return [ShardedChunk(model, wrapped, groups, ddp) for model in models]
    chunks: list[Any] = [
        DistributedDataParallel(
            config=model.config,
            ddp_config=wrapped,
            module=model,
            pg_collection=groups,
            # After the first chunk no work is left that could hide a gather of weights.
            disable_bucketing=index > 0,
        )
        for index, model in enumerate(models)
    ]
    if wrapped.overlap_grad_reduce:
        no_syncs: Any = [chunk.no_sync for chunk in chunks]
        # Megatron-Core's schedules look at the first chunk's configuration.
        chunks[0].config.no_sync_func = no_syncs if len(chunks) > 1 else no_syncs[0]
    return chunks


def named_weights(chunk: ModelChunk) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of each weight of `chunk`; with FSDP, this rank's rows of it."""
    return ((name.removeprefix("module."), weight) for name, weight in chunk.named_parameters())


def zero_gradients(chunks: Sequence[ModelChunk], optimizer: MegatronOptimizer) -> None:
    """Clears the gradients of `chunks` and of the main parameters."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def gradient_buffers(chunks: Sequence[ModelChunk]) -> list[Tensor]:
    """Buffers in which gradients are accumulated and reduced; with FSDP, gradients of rows."""
    found: list[Tensor] = []
    for chunk in chunks:
        if isinstance(chunk, ShardedChunk):
            found += chunk.gradients()
        else:
            found += [buffer.grad_data for buffer in chunk.buffers]  # type: ignore[union-attr]
    return found


def types_of(chunks: Sequence[ModelChunk]) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """(dtypes of the weights in a forward pass, dtypes of the gradients that ranks reduce)."""
    weights, gradients = set(), {buffer.dtype for buffer in gradient_buffers(chunks)}
    for chunk in chunks:
        for weight in chunk.parameters():
            rows = rows_of(weight)
            weights.add(weight.dtype if rows is None else rows.dtype)
        if isinstance(chunk, ShardedChunk):  # it has no gradients between steps
            gradients |= chunk.gradient_types
    return weights, gradients


def is_sharded(chunks: Sequence[ModelChunk]) -> bool:
    """Whether data ranks divide the update of the weights (distributed optimizer or FSDP)."""
    return chunks[0].ddp_config.use_distributed_optimizer


def state_copy(chunks: Sequence[ModelChunk], groups: ProcessGroupCollection) -> int:
    """Index of the copy of the optimizer state to which this rank of `groups` belongs.

    Without the distributed optimizer each data rank has its own copy.
    """
    return groups.dp_cp.rank() // (groups.intra_dp_cp.size() if is_sharded(chunks) else 1)


@contextmanager
def gathered_weights(chunks: Sequence[ModelChunk]) -> Iterator[None]:
    """A context with all weights gathered and without the gathers of `ddp.overlap_param_gather`.

    With that option each forward pass gathers the weights that other ranks updated in the last
    step. Ranks that save, or validate fewer packs than others, must not wait for a gather that the
    others never begin. Without that option, and with FSDP, the context does nothing.
    """
    overlapped: list[Any] = [one for one in chunks if one.ddp_config.overlap_param_gather]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in overlapped:
        chunk.enable_forward_pre_hook()


@contextmanager
def own_passes(chunks: Sequence[ModelChunk]) -> Iterator[None]:
    """A context in which data ranks may run different numbers of passes without gradients.

    All ranks enter it. Weights must not change inside. With FSDP, a rank leaves it only after it
    has joined the all-gathers of every other rank's passes.
    """
    with ExitStack() as inside:
        for chunk in chunks:
            if isinstance(chunk, ShardedChunk):
                inside.enter_context(chunk.in_company())
        yield


def publish_main_params(optimizer: MegatronOptimizer, chunks: Sequence[ModelChunk]) -> None:
    """Copies the float32 main parameters to the model's weights, on all data ranks."""
    for inner in chained_optimizers(optimizer):
        if not isinstance(inner, FP32Optimizer):  # it shares its memory with the weights
            inner._copy_main_params_to_model_params()
    if is_sharded(chunks):
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def chained_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron-Core chains into `optimizer`, except those without parameters.

    A pipeline stage whose weights are all frozen has an optimizer without parameters.
    """
    return [one for one in every_optimizer(optimizer) if not one.is_stub_optimizer]


def every_optimizer(optimizer: MegatronOptimizer) -> list[Any]:
    """All optimizers that Megatron-Core chains into `optimizer`."""
    return optimizer.chained_optimizers  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class MainParamShard:
    """The shard of a weight that this rank's optimizer updates, in float32."""

    # The weight in the model: this rank's part under tensor parallelism, and its rows with FSDP.
    weight: torch.nn.Parameter
    value: Tensor
    part: slice  # of the flattened weight


def main_param_shards(optimizer: MegatronOptimizer) -> list[MainParamShard]:
    """Shards of all main parameters that this rank's optimizer updates, in a fixed order."""
    of_each = (main_param_shards_of(inner) for inner in chained_optimizers(optimizer))
    return [*chain.from_iterable(of_each)]


def main_param_shards_of(inner: MegatronOptimizer) -> Iterator[MainParamShard]:
    """Shards of the main parameters of `inner`, one of the chained optimizers."""
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
        rows = rows_of(value)
        part = slice(0, value.numel()) if rows is None else rows.part
        yield MainParamShard(weights.get(value, value), value, part)


class Holding(NamedTuple):
    """A shard of a weight, and the data rank that updates it, or (FSDP) stores it."""

    rank: int
    copy: int  # of the optimizer state; there are several with ddp.dp_replicate_size
    part: slice  # of the flattened weight

    @property
    def size(self) -> int:
        return self.part.stop - self.part.start


def holdings(
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroupCollection,
    weights: Iterable[Tensor],
) -> dict[Tensor, list[Holding]]:
    """Weight -> its shards, each with its data rank; an empty list for a trained, unsharded weight.

    The distributed optimizer shards the trained weights. FSDP shards all `weights`, also frozen
    ones; without FSDP the argument is not used. Nothing is communicated: Megatron-Core divides each
    bucket equally among ranks, and torch the rows of each weight.
    """
    held: dict[Tensor, list[Holding]] = {}
    ranks, copies = groups.intra_dp_cp.size(), groups.dp_cp.size() // groups.intra_dp_cp.size()

    def of_copies(parts: Iterable[tuple[int, slice]]) -> list[Holding]:
        of_one = [*parts]
        return [
            Holding(copy * ranks + rank, copy, part)
            for copy in range(copies)
            for rank, part in of_one
        ]

    for weight in weights:
        if (rows := rows_of(weight)) is not None:
            held[weight] = of_copies(rows.parts())
    for inner in chained_optimizers(optimizer) if optimizer is not None else ():
        if not isinstance(inner, DistributedOptimizer):
            held |= {s.weight: [] for s in main_param_shards_of(inner) if s.weight not in held}
            continue
        for buffer in inner.buffers:
            for weight, (start, stop, bucket) in buffer.param_index_map.items():
                held[weight] = of_copies(_parts(buffer.buckets[bucket], start, stop, ranks))
    return held


def _parts(bucket: Any, start: int, stop: int, ranks: int) -> Iterator[tuple[int, slice]]:
    """(data rank, slice) of each shard of a weight at [start, stop) of the bucket's buffer."""
    size = bucket.grad_data.numel() // ranks
    first, last = (start - bucket.offset) // size, (stop - 1 - bucket.offset) // size
    edges = [bucket.offset + rank * size for rank in range(first, last + 2)]
    spans = [(max(start, a) - start, min(stop, b) - start) for a, b in pairwise(edges)]
    return ((rank, slice(*span)) for rank, span in enumerate(spans, first))
