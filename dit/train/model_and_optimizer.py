"""Everything that learns: model, optimizer and the average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from dit.config import EmaKind, RunConfig
from dit.distributed.process_groups import device
from dit.models.dit.model import DiT
from dit.models.layers import init
from dit.models.layers.parallel_linear import add_gradients_in_products
from dit.train.ema import Ema
from dit.train.metrics.step_metrics import COMMUNICATION, timed
from dit.train.optimizer import build_optimizer

Fill = Callable[[DiT, RunConfig], None]


def initialise_weights(model: DiT, config: RunConfig) -> None:
    """The weights that training starts from."""
    init.initialise(model, seed=config.rng.seed, std=config.model.init_method_std)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAndOptimizer:
    """What a step changes, and the groups of processes that share it."""

    chunks: list[DistributedDataParallel]  # the parts of the model on this rank
    optimizer: MegatronOptimizer
    ema: Ema | None
    groups: ProcessGroupCollection

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, the weights are whole on every rank, and no gather of them is under way.

        With `ddp.overlap_param_gather` each forward pass fetches the weights that the last step
        left on other ranks. Ranks that save, or that validate fewer packs than others, must not
        wait for a fetch that the others never begin.
        """
        overlapped = self.chunks[0].ddp_config.overlap_param_gather
        for chunk in self.chunks if overlapped else ():
            chunk.disable_forward_pre_hook(param_sync=True)
        yield
        for chunk in self.chunks if overlapped else ():
            chunk.enable_forward_pre_hook()


def build_model_and_optimizer(
    config: RunConfig, groups: ProcessGroupCollection, *, fill: Fill = initialise_weights
) -> ModelAndOptimizer:
    """A model with the values that `fill` gives it, a fresh optimizer, and an average if wanted."""
    chunks = build_model(config, groups, fill=fill)
    optimizer = build_optimizer(config, chunks)
    averaged = config.ema.kind is not EmaKind.NONE
    ema = Ema(config.ema, optimizer, groups) if averaged else None
    return ModelAndOptimizer(chunks=chunks, optimizer=optimizer, ema=ema, groups=groups)


def build_model(
    config: RunConfig, groups: ProcessGroupCollection, *, fill: Fill = initialise_weights
) -> list[DistributedDataParallel]:
    """The chunks of the model that this rank holds, with the values of `fill`, under DDP.

    One chunk for each virtual pipeline stage.
    """
    virtual = config.model.virtual_stages
    stages = range(virtual) if virtual > 1 else [None]
    models = [DiT(config.model, groups, stage).to(device()) for stage in stages]
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


def _wrap(model: DiT, config: RunConfig, groups: ProcessGroupCollection) -> DistributedDataParallel:
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
