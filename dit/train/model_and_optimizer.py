"""Configuration -> model under data parallelism, its optimizer, and the average of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from dit.config import EmaKind, RunConfig
from dit.distributed.data_parallel import ModelChunk, wrap
from dit.distributed.process_groups import device
from dit.models.family import family_of
from dit.models.layers import init
from dit.models.layers.parallel_linear import add_gradients_in_products
from dit.train.ema import Ema
from dit.train.metrics.step_metrics import COMMUNICATION, timed
from dit.train.optimizer import build_optimizer

Fill = Callable[[MegatronModule, RunConfig], None]
"""Gives the weights of a model their first values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAndOptimizer:
    """Everything that a step changes, and the groups of processes that share it."""

    chunks: list[ModelChunk]  # the parts of the model on this rank, one a virtual pipeline stage
    optimizer: MegatronOptimizer
    ema: Ema | None
    groups: ProcessGroupCollection

    @property
    def modules(self) -> list[Any]:
        """The networks inside the chunks."""
        return [chunk.module for chunk in self.chunks]


def build_model_and_optimizer(
    config: RunConfig, groups: ProcessGroupCollection, *, fill: Fill | None = None
) -> ModelAndOptimizer:
    """A model filled by `fill`, a fresh optimizer, and the average of the weights if configured."""
    chunks = build_model(config, groups, fill=fill or initialise_weights)
    optimizer = build_optimizer(config, chunks)
    averaged = config.ema.kind is not EmaKind.NONE
    ema = Ema(config.ema, optimizer, groups) if averaged else None
    return ModelAndOptimizer(chunks=chunks, optimizer=optimizer, ema=ema, groups=groups)


def initialise_weights(model: MegatronModule, config: RunConfig) -> None:
    """Fills in the weights that training starts from."""
    rules, std = family_of(config.model).weights, config.model.init_method_std
    init.initialise(model, seed=config.rng.seed, std=std, zero=rules.starts_at_zero)


def build_model(
    config: RunConfig, groups: ProcessGroupCollection, *, fill: Fill
) -> list[ModelChunk]:
    """The parts of the model on this rank, filled and wrapped for data parallelism."""
    virtual = config.model.virtual_stages
    stages = range(virtual) if virtual > 1 else [None]
    network = family_of(config.model).network()
    models = [network(config.model, groups, stage).to(device()) for stage in stages]
    for model in models:
        fill(model, config)
        if config.model.gradient_accumulation_fusion:
            add_gradients_in_products(model)
    chunks = wrap(models, config, groups)
    # Megatron-Core's schedules look at the first chunk's configuration.
    chunks[0].config.finalize_model_grads_func = timed(COMMUNICATION)(finalize_model_grads)
    return chunks
