"""Average of the weights over the steps, in float32, sharded as the optimizer shards them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.config import EmaConfig, EmaKind
from dit.train.main_params import joined, main_param_shards


def power_exponent(sigma_rel: float) -> float:
    """Exponent gamma of the power profile of relative width `sigma_rel`.

    Source: arXiv:2312.02696, Eq. 126.
    """
    inverse = sigma_rel**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(roots.real.max())


def decay_at(config: EmaConfig, step: int) -> float:
    """Weight that the average keeps at optimizer step `step`, counted from 1.

    power: (1 - 1/step)^(gamma + 1) (arXiv:2312.02696, Eq. 127), which forgets the initial weights.
    """
    if config.kind is EmaKind.CONSTANT:
        return config.decay
    return (1 - 1 / step) ** (power_exponent(config.sigma_rel) + 1)


class Ema:
    """The averages beside an optimizer's main parameters, one for each, in the same order."""

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
        """Takes the weights after optimizer step `step` into the average."""
        rate = 1 - decay_at(self.config, step)
        for average, shard in zip(self.averages, self.shards, strict=True):
            average.lerp_(shard.value, rate)

    @torch.no_grad()
    def restart(self) -> None:
        """Begins again, from the present weights."""
        for average, shard in zip(self.averages, self.shards, strict=True):
            average.copy_(shard.value)

    @contextmanager
    def as_weights(self, chunks: list[DistributedDataParallel]) -> Iterator[None]:
        """Inside, the model computes with the averages; afterwards with its own weights again."""
        kept = [shard.value.detach().clone() for shard in self.shards]
        self._publish(self.averages, chunks)
        try:
            yield
        finally:
            self._publish(kept, chunks)

    @torch.no_grad()
    def _publish(self, values: list[Tensor], chunks: list[DistributedDataParallel]) -> None:
        """Makes `values` the main parameters, and the model's weights on all data ranks."""
        for shard, value in zip(self.shards, values, strict=True):
            shard.value.copy_(value)
        for inner in self.optimizer.chained_optimizers:  # type: ignore[attr-defined]
            if not isinstance(inner, FP32Optimizer):  # which shares its memory with the weights
                inner._copy_main_params_to_model_params()
        if chunks[0].ddp_config.use_distributed_optimizer:
            for chunk in chunks:
                chunk.start_param_sync(force_sync=True)

    def sharded_state_dict(self, model: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """The averages in the shape of the weights, for a checkpoint of any layout.

        `model` is the model's own sharded state. Collective: every data rank gives its parts.
        """
        averages = {}
        if not loading:
            ranks = self.groups.dp_cp
            averages = joined(self.optimizer, self.averages, model, data_ranks=ranks)
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
    def load(self, wholes: dict[Tensor, Tensor]) -> None:
        """Takes this rank's parts of the averages of whole weights."""
        for shard, average in zip(self.shards, self.averages, strict=True):
            average.copy_(wholes[shard.weight].flatten()[shard.part].view(average.shape))
