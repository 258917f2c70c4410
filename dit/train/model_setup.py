"""Configuration -> model under Megatron-Core's DDP, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from dit.config import Decay, Precision, RunConfig
from dit.distributed.process_groups import device
from dit.models.family import family_of
from dit.models.layers import init
from dit.models.layers.parallel_linear import add_gradients_in_products
from dit.train.adamw import install_adam
from dit.train.metrics.timers import COMMUNICATION, timed

Fill = Callable[[MegatronModule, RunConfig], None]
_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


def initialise_weights(model: MegatronModule, config: RunConfig) -> None:
    """The weights that training starts from."""
    init.initialise(model, seed=config.rng.seed, std=config.model.init_method_std)


def build_model(
    config: RunConfig, groups: ProcessGroupCollection, *, fill: Fill = initialise_weights
) -> list[DistributedDataParallel]:
    """The chunks of the model that this rank holds, with the values of `fill`, under DDP.

    One chunk for each virtual pipeline stage.
    """
    virtual = config.model.virtual_stages
    stages = range(virtual) if virtual > 1 else [None]
    network = family_of(config.model).network()
    models = [network(config.model, groups, stage).to(device()) for stage in stages]
    for model in models:
        fill(model, config)
        if config.model.gradient_accumulation_fusion:
            add_gradients_in_products(model)
    chunks = [_wrap(model, config, groups) for model in models]
    # Megatron-Core's schedules look at the first chunk's.
    schedule = chunks[0].config
    schedule.finalize_model_grads_func = timed(COMMUNICATION, finalize_model_grads)
    if config.ddp.overlap_grad_reduce:
        waits: Any = [chunk.no_sync for chunk in chunks]
        schedule.no_sync_func = waits if virtual > 1 else waits[0]
    return chunks


def _wrap(
    model: MegatronModule, config: RunConfig, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=config.ddp.overlap_grad_reduce,
        overlap_param_gather=config.ddp.overlap_param_gather,
        use_distributed_optimizer=config.ddp.use_distributed_optimizer,
        bucket_size=config.ddp.bucket_size,
        average_in_collective=False,  # gradients are sums until divided by the global token count
        check_for_nan_in_grad=False,  # it raises on one rank only; the step looks at the norm
    )
    return DistributedDataParallel(
        config=model.config,
        ddp_config=ddp,
        module=model,
        pg_collection=groups,
        # Later chunks have no work left that a gather of theirs could hide behind.
        disable_bucketing=bool(model.vp_stage),
    )


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
    for pattern in family_of(config.model).weights.no_decay:  # nor on embeddings
        overrides[ParamKey(name=pattern)] = spared
    install_adam(always=c.optimizer_cpu_offload)
    optimizer = get_megatron_optimizer(
        options, [*chunks], config_overrides=overrides, use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        # `set_learning_rate` hands these out. From 0.17 on Megatron-Core tells groups apart by
        # them, so a checkpoint would not open with another learning rate.
        group |= {name: None for name in _SCHEDULE if name in group}
    for inner in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        # Else a checkpoint before the first update has no moments and cannot be written.
        inner.init_state_fn(inner.optimizer, inner.config)
        if c.optimizer_cpu_offload:
            inner.optimizer.keep_on_host()
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
