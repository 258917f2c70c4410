"""Configuration -> model under Megatron-Core's DDP, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.process_groups_config import ProcessGroupCollection

from dit.config import Decay, Precision, RunConfig
from dit.model.dit import DiT
from dit.model.weights import initialise
from dit.parallel.groups import device


def build_model(config: RunConfig, groups: ProcessGroupCollection) -> list[DistributedDataParallel]:
    """The chunks of the model that this rank holds, with initial weights, under DDP."""
    model = DiT(config.model, groups).to(device())
    initialise(model, seed=config.rng.seed, std=config.model.init_method_std)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=config.ddp.overlap_grad_reduce,
        overlap_param_gather=config.ddp.overlap_param_gather,
        use_distributed_optimizer=config.ddp.use_distributed_optimizer,
        bucket_size=config.ddp.bucket_size,
        average_in_collective=False,  # gradients are sums until divided by the global token count
        check_for_nan_in_grad=False,  # it raises on one rank only; the step looks at the norm
    )
    chunk = DistributedDataParallel(
        config=model.config, ddp_config=ddp, module=model, pg_collection=groups
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    if config.ddp.overlap_grad_reduce:
        model.config.no_sync_func = chunk.no_sync
    return [chunk]


def build_optimizer(config: RunConfig, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """AdamW, sharded over data-parallel ranks where configured, with float32 master weights."""
    c = config.optimizer
    options = OptimizerConfig(
        optimizer="adam",
        lr=c.lr,
        min_lr=c.min_lr,
        weight_decay=c.weight_decay,
        adam_beta1=c.adam_beta1,
        adam_beta2=c.adam_beta2,
        adam_eps=c.adam_eps,
        clip_grad=c.clip_grad,
        bf16=config.model.precision is Precision.BF16,
        params_dtype=chunks[0].config.params_dtype,
        use_distributed_optimizer=config.ddp.use_distributed_optimizer,
        overlap_param_gather=config.ddp.overlap_param_gather,
    )
    overrides = get_standard_config_overrides(options)  # no decay on norms and biases
    spared: Any = {"wd_mult": 0.0}
    overrides[ParamKey(name="*pos_emb_*")] = spared  # nor on embeddings
    optimizer = get_megatron_optimizer(
        options, [*chunks], config_overrides=overrides, use_gloo_process_groups=False
    )
    for inner in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        # Else a checkpoint before the first update has no moments and cannot be written.
        inner.init_state_fn(inner.optimizer, inner.config)
    return optimizer


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1; the last one gets `min_lr`."""
    warmup, horizon = config.scheduler.lr_warmup_iters, config.decay_iters
    peak, floor = config.optimizer.lr, config.optimizer.min_lr
    if step <= warmup:
        return peak * step / warmup
    done = min((step - warmup) / (horizon - warmup), 1.0)
    match config.scheduler.lr_decay_style:
        case Decay.CONSTANT:
            return peak
        case Decay.LINEAR:
            return peak + done * (floor - peak)
        case Decay.COSINE:
            return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: MegatronOptimizer, rate: float, *, weight_decay: float) -> None:
    """Hands this step's rate to every parameter group, and its share of the weight decay."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


@dataclass(frozen=True, slots=True)
class MainShard:
    """The part of one weight that this rank's optimizer updates, in float32."""

    weight: torch.nn.Parameter  # in the model, whole
    value: torch.Tensor
    part: slice  # of the flattened weight


def main_shards(optimizer: MegatronOptimizer) -> list[MainShard]:
    """What this rank's optimizer updates, in a fixed order."""
    return [
        shard
        for inner in optimizer.chained_optimizers  # type: ignore[attr-defined]
        for shard in _main_shards(inner)
    ]


def _main_shards(inner: MegatronOptimizer) -> Iterator[MainShard]:
    if isinstance(inner, DistributedOptimizer):
        groups = inner.optimizer.param_groups
        for weight, (group, order) in inner.model_param_group_index_map.items():
            part = inner._get_model_param_range_map(weight)["param"]
            yield MainShard(weight, groups[group]["params"][order], slice(part.start, part.end))
        return
    copies = {}
    if isinstance(inner, Float16OptimizerWithFloat16Params):
        halves, wholes = chain(*inner.float16_groups), chain(*inner.fp32_from_float16_groups)
        copies = {whole: half for half, whole in zip(halves, wholes, strict=True)}
    for value in inner.get_parameters():
        yield MainShard(copies.get(value, value), value, slice(0, value.numel()))
