"""The moving average of the weights (EMA), in float32, sharded like the optimizer's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from dit.config import EmaConfig, EmaKind
from dit.distributed.data_parallel import ModelChunk, main_param_shards, publish_main_params
from dit.train.optimizer import foreach


def power_exponent(sigma_rel: float) -> float:
    """The exponent gamma of the power profile with relative width `sigma_rel`.

    Source: arXiv:2312.02696, Eq. 126.
    """
    inverse = sigma_rel**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(roots.real.max())


def decay_at(config: EmaConfig, step: int) -> float:
    """The factor of the old average at update `step`, counted from 1.

    With `ema.kind=power` it is (1 - 1/step)^(gamma + 1) (arXiv:2312.02696, Eq. 127), which is 0 at
    step 1, so the initial weights are forgotten.
    """
    if config.kind is EmaKind.CONSTANT:
        return config.decay
    return (1 - 1 / step) ** (power_exponent(config.sigma_rel) + 1)


class Ema:
    """The moving average (EMA) of each main parameter of an optimizer, in the same order."""

    def __init__(
        self, config: EmaConfig, optimizer: MegatronOptimizer, groups: ProcessGroupCollection
    ):
        self.config = config
        self.optimizer = optimizer
        self.groups = groups
        self.shards = main_param_shards(optimizer)
        self.updates_before = 0  # updates before this run (`train.warm_start_ema`)
        self.averages = [shard.value.detach().clone() for shard in self.shards]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the weights after update `step` of the run."""
        rate = 1 - decay_at(self.config, self.updates_before + step)
        foreach.lerp(self.averages, [shard.value for shard in self.shards], rate)

    @torch.no_grad()
    def restart(self) -> None:
        """Sets the average to the current weights."""
        for average, shard in zip(self.averages, self.shards, strict=True):
            average.copy_(shard.value)

    @contextmanager
    def as_weights(self, chunks: list[ModelChunk]) -> Iterator[None]:
        """A context in which the weights of `chunks` and their averages are exchanged.

        After an error they stay exchanged, because exchanging them back needs all ranks, and the
        error may have ended only one.
        """
        self._swap(chunks)
        yield
        self._swap(chunks)

    @torch.no_grad()
    def _swap(self, chunks: list[ModelChunk]) -> None:
        """Exchanges averages and main parameters, and copies the latter to the model's weights."""
        for average, shard in zip(self.averages, self.shards, strict=True):
            own = shard.value.clone()  # one at a time: memory may not hold all of them twice
            shard.value.copy_(average)
            average.copy_(own)
        publish_main_params(self.optimizer, chunks)
