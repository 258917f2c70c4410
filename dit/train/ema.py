"""Exponential moving average of the weights, in float32, sharded as the optimizer's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.config import EmaConfig, EmaKind
from dit.distributed.data_parallel import (
    ModelChunk,
    main_param_shards,
    publish_main_params,
    unshard,
)


def power_exponent(sigma_rel: float) -> float:
    """Exponent gamma of the power profile of relative width `sigma_rel`.

    Source: arXiv:2312.02696, Eq. 126.
    """
    inverse = sigma_rel**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(roots.real.max())


def decay_at(config: EmaConfig, step: int) -> float:
    """Weight of the old average at update `step`, counted from 1.

    power: (1 - 1/step)^(gamma + 1) (arXiv:2312.02696, Eq. 127); it is 0 at step 1, so the initial
    weights are forgotten.
    """
    if config.kind is EmaKind.CONSTANT:
        return config.decay
    return (1 - 1 / step) ** (power_exponent(config.sigma_rel) + 1)


class Ema:
    """One average for each main parameter of an optimizer, in the same order."""

    def __init__(
        self, config: EmaConfig, optimizer: MegatronOptimizer, groups: ProcessGroupCollection
    ):
        self.config = config
        self.optimizer = optimizer
        self.groups = groups
        self.shards = main_param_shards(optimizer)
        self.averages = [shard.value.detach().clone() for shard in self.shards]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights after update `step` to the average."""
        rate = 1 - decay_at(self.config, step)
        for average, shard in zip(self.averages, self.shards, strict=True):
            average.lerp_(shard.value, rate)

    @torch.no_grad()
    def restart(self) -> None:
        """Restarts the average from the current weights."""
        for average, shard in zip(self.averages, self.shards, strict=True):
            average.copy_(shard.value)

    @contextmanager
    def as_weights(self, chunks: list[ModelChunk]) -> Iterator[None]:
        """Inside, the model's weights are the averages; afterwards they are its own again."""
        own = [shard.value.detach().clone() for shard in self.shards]
        self._set_weights(self.averages, chunks)
        try:
            yield
        finally:
            self._set_weights(own, chunks)

    @torch.no_grad()
    def _set_weights(self, values: list[Tensor], chunks: list[ModelChunk]) -> None:
        """Sets the main parameters, and with them the model's weights on all data ranks."""
        for shard, value in zip(self.shards, values, strict=True):
            shard.value.copy_(value)
        publish_main_params(self.optimizer, chunks)

    def sharded_state_dict(self, model: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """The averages in the shape of the weights, for a checkpoint that loads on any layout.

        `model` is the sharded state of the weights. Collective: every data rank gives its parts.
        """
        averages = {}
        if not loading:
            ranks = self.groups.dp_cp
            averages = unshard(self.optimizer, self.averages, model, data_ranks=ranks)
        return {
            name: self._entry(entry, averages.get(name))
            for name, entry in model.items()
            if isinstance(entry, ShardedTensor) and entry.data is not None
        }

    def _entry(self, weight: ShardedTensor, average: Tensor | None) -> ShardedTensor:
        assert weight.data is not None
        data = torch.empty_like(weight.data, dtype=torch.float32) if average is None else average
        return replace(weight, key=f"ema.{weight.key}", data=data, dtype=data.dtype)

    @torch.no_grad()
    def load(self, averages: dict[Tensor, Tensor]) -> None:
        """Takes this rank's parts of the averages, which are given by weight of the model."""
        for shard, average in zip(self.shards, self.averages, strict=True):
            average.copy_(averages[shard.weight].flatten()[shard.part].view(average.shape))
