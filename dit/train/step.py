"""One optimizer step: loss and gradients of packs, then updated weights.

1. forward_backward    the replica's packs through the pipeline; gradients of the global batch
2. optimizer_step      clipped gradients, AdamW, EMA of the weights
"""

# T packed tokens, C patch features

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import LATENTS, PackedBatch
from dit.config import ObjectiveConfig, RunConfig
from dit.distributed.data_parallel import ModelChunk, zero_gradients
from dit.distributed.model_parallel import Item, rank_part, run_pipeline
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.train.loss import Loss, loss_of
from dit.train.optimizer.update import (
    Update,
    clip_and_step,
    learning_rate,
    set_learning_rate,
    squared_norm,
)
from dit.train.references import References, with_references
from dit.train.timers import BACKWARD, FORWARD, OPTIMIZER, timed

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer


PackLoss = tuple[Loss, PackedBatch]  # the loss of a pack on this rank, and this rank's part of it


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoss:
    """What this rank adds to the loss of a step: its sums, and the losses of its packs."""

    sums: Tensor  # float64 [2] on the device: error and its divisor
    packs: tuple[PackLoss, ...]

    @classmethod
    def of(cls, losses: Sequence[PackLoss]) -> RankLoss:
        numbers = [torch.stack([loss.total, loss.count]).double() for loss, _ in losses]
        # Only ranks of the last pipeline stage have losses.
        numbers = numbers or [torch.zeros(2, dtype=torch.float64, device=device())]
        return cls(sums=torch.stack(numbers).sum(0), packs=tuple(losses))

    @property
    def total(self) -> float:
        """The summed error of this rank's tokens; waits for the device, as `count` does."""
        return self.sums[0].item()

    @property
    def count(self) -> float:
        """The divisor of `total`."""
        return self.sums[1].item()

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Keys of the samples whose error is NaN or infinite."""
        return () if math.isfinite(self.total) else tuple(_not_finite(self.packs))


def _not_finite(losses: Sequence[PackLoss]) -> Iterator[str]:
    for loss, pack in losses:
        errors = {LATENTS: loss.error_T, **loss.others}
        owners = [s.segment_T[~errors[name].isfinite()] for name, s in pack.streams.items()]
        yield from (pack.keys[owner] for owner in torch.cat(owners).unique().tolist())


def forward_backward(
    model: ModelAndOptimizer,
    items: Sequence[Item],
    *,
    objective: ObjectiveConfig,
    references: References | None = None,
) -> RankLoss:
    """First half of a step: gradients of this replica's packs, `items`; returns their loss.

    Gradients of an earlier step are cleared first.
    """
    with timed(OPTIMIZER):
        zero_gradients(model.chunks, model.optimizer)
    with timed(BACKWARD):  # all seconds that are not timed as other parts
        losses = run_schedule(model.chunks, items, options=objective, references=references)
    return RankLoss.of(losses)


def prepare_update(model: ModelAndOptimizer) -> Tensor:
    """Prepares the gradients for the update; returns their squared norm [1] on the device."""
    heartbeat("update")
    with timed(OPTIMIZER):
        return squared_norm(model.optimizer)


def optimizer_step(
    model: ModelAndOptimizer,
    *,
    config: RunConfig,
    number: int,
    loss: float,
    grad_norm: float | None = None,
    averaged: int | None = None,
) -> Update:
    """Second half of a step: updates the weights by their gradients, then the EMA.

    `number` counts updates from 1 for the learning rate, and `averaged` counts those of the EMA
    (None: `number`). `loss` is the loss of the global batch. `grad_norm` is the root of the result
    of `prepare_update`; None if that was not called. If the loss or the gradient is not finite,
    nothing changes on any rank.
    """
    heartbeat("update")
    c = config.optimizer
    with timed(OPTIMIZER):
        rate = learning_rate(config, number)
        set_learning_rate(model.optimizer, rate, weight_decay=c.weight_decay)
        update = clip_and_step(
            model.optimizer, clip_grad=c.clip_grad, loss=loss, grad_norm=grad_norm
        )
        if model.ema is not None and not update.skipped:
            model.ema.update(number if averaged is None else averaged)
    return update


def run_schedule(
    chunks: list[ModelChunk],
    items: Sequence[Item],
    *,
    options: ObjectiveConfig,
    forward_only: bool = False,
    references: References | None = None,
) -> list[PackLoss]:
    """Runs this replica's packs through the model, one micro-batch each.

    Returns the losses on the rank that computes them, and an empty list on others. Unless
    `forward_only`, gradients of the mean loss over the global batch are accumulated.
    """
    module: Any = chunks[0].module
    mine = [rank_part(module, item) for item in items]
    if references is not None:
        mine = [
            (batch, with_references(batch, problem, references, pack))
            for pack, (batch, problem) in enumerate(mine)
        ]
    forward = partial(_forward, options=options, context=module.groups.cp)
    losses = run_pipeline(chunks, mine, forward, forward_only=forward_only)
    if not losses or module.groups.tp.rank() > 0:  # not the last stage, or a copy of its losses
        return []
    return [(loss, batch) for loss, (batch, _) in zip(losses, mine, strict=True)]


def _forward(
    items: Iterator[Item],
    model: torch.nn.Module,
    *,
    options: ObjectiveConfig,
    context: dist.ProcessGroup,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Loss]]]:
    heartbeat("forward and backward pass")
    batch, problem = next(items)
    with timed(FORWARD):
        prediction_TC = model(problem.input_TC, problem.level_M, batch)

    def reduce(prediction_TC: Tensor) -> tuple[Tensor, Tensor, Loss]:
        with timed(FORWARD):
            loss = loss_of(batch, problem, prediction_TC, options, context=context)
        # Copied, because the schedule may scale the first in place.
        total, error_T = loss.total.detach().clone(), loss.error_T.detach()
        return loss.total, loss.count, replace(loss, total=total, error_T=error_T)

    return prediction_TC, reduce
