"""Everything that learns: model, optimizer and the average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from dit.config import EmaKind, RunConfig
from dit.train.build import build_model, build_optimizer
from dit.train.ema import Ema


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
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


def build_learner(config: RunConfig, groups: ProcessGroupCollection) -> Learner:
    """Initial weights, a fresh optimizer, and the average where one is configured."""
    chunks = build_model(config, groups)
    optimizer = build_optimizer(config, chunks)
    averaged = config.ema.kind is not EmaKind.NONE
    ema = Ema(config.ema, optimizer, groups) if averaged else None
    return Learner(chunks=chunks, optimizer=optimizer, ema=ema, groups=groups)
