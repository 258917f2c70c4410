"""Everything that learns: model, optimizer and the average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from dit.config import EmaKind, RunConfig
from dit.distributed.watchdog.monitor import heartbeat
from dit.train.ema import Ema
from dit.train.metrics.timers import BACKWARD, OPTIMIZER, timing
from dit.train.model_setup import (
    Fill,
    build_model,
    build_optimizer,
    initialise_weights,
    learning_rate,
    set_learning_rate,
)
from dit.train.step import Item, RankLoss, Update, run_schedule, update


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


def forward_backward(
    learner: ModelAndOptimizer, items: Sequence[Item], *, config: RunConfig
) -> RankLoss:
    """First half of a step: this replica's packs in, gradients of the global batch out."""
    with timing(OPTIMIZER):
        for chunk in learner.chunks:
            chunk.zero_grad_buffer()
        learner.optimizer.zero_grad()
    with timing(BACKWARD):  # what the parts inside do not claim
        losses = run_schedule(learner.chunks, items, mean=config.objective.loss_mean)
    return RankLoss.of(losses)


def optimizer_step(
    learner: ModelAndOptimizer, *, config: RunConfig, number: int, loss: float
) -> Update:
    """Second half: gradients in, updated weights and average out.

    `number` counts updates from 1, and `loss` is that of the global batch. Where it, or the
    gradient, is not finite, nothing changes on any rank.
    """
    heartbeat("update")
    with timing(OPTIMIZER):
        return _learn(learner, config, number, loss)


def _learn(learner: ModelAndOptimizer, config: RunConfig, number: int, loss: float) -> Update:
    rate, decay = learning_rate(config, number), config.optimizer.weight_decay
    set_learning_rate(learner.optimizer, rate, weight_decay=decay)
    done = update(learner.optimizer, clip_grad=config.optimizer.clip_grad, loss=loss)
    if learner.ema is not None and not done.skipped:
        learner.ema.update(number)
    return done


def build_model_and_optimizer(
    config: RunConfig, groups: ProcessGroupCollection, *, fill: Fill = initialise_weights
) -> ModelAndOptimizer:
    """A model with the values that `fill` gives it, a fresh optimizer, and an average if wanted."""
    chunks = build_model(config, groups, fill=fill)
    optimizer = build_optimizer(config, chunks)
    averaged = config.ema.kind is not EmaKind.NONE
    ema = Ema(config.ema, optimizer, groups) if averaged else None
    return ModelAndOptimizer(chunks=chunks, optimizer=optimizer, ema=ema, groups=groups)
