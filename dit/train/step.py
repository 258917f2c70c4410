"""One optimizer step: packs -> loss and gradients -> updated weights.

1. forward_backward    the replica's packs through the pipeline; gradients of the global batch
2. loss_of             error of the prediction, weighted as the objective says; its sums over ranks
3. optimizer_step      clipped gradients, AdamW, average of the weights
"""

# T packed tokens, N samples, C patch features

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.config import LossKind, LossMean, ObjectiveConfig, RunConfig
from dit.distributed.data_parallel import ModelChunk, zero_gradients
from dit.distributed.model_parallel import Item, rank_part, run_pipeline
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.pack_wire import to_device
from dit.train.optimizer.update import (
    Update,
    clip_and_step,
    learning_rate,
    set_learning_rate,
    squared_norm,
)
from dit.train.reference_passes import References, with_references
from dit.train.timers import BACKWARD, FORWARD, OPTIMIZER, timed

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Sum of the errors over this rank's tokens, and its part of the divisor of the mean."""

    total: Tensor  # float32 scalar
    count: Tensor  # int32 scalar: target tokens, or samples
    error_T: Tensor  # float32, each token's part of `total`
    count_N: Tensor  # int32, each sample's part of `count`

    def of_samples(self, batch: PackedBatch) -> Tensor:
        """Error and count of each sample, float64 [N, 2]."""
        error_N = torch.zeros(batch.num_samples, dtype=torch.float64, device=self.error_T.device)
        error_N.index_add_(0, batch.segment_T, self.error_T.double())
        return torch.stack([error_N, self.count_N.double()], dim=1)


def pseudo_huber(error_TC: Tensor, *, c: float) -> Tensor:
    """sqrt(e² + c²) - c of each number: arXiv:2310.14189, Sec. 3.3, as diffusion-pipe applies it.

    Written as a quotient, because the difference loses its digits in float32 where e is below
    c / 1000. Diffusers' examples have 2 c times this, which AdamW's steps do not see but the bound
    of the gradient's norm does.
    """
    square_TC = error_TC.square()
    return square_TC / ((square_TC + c * c).sqrt() + c)


def loss_of(
    batch: PackedBatch, problem: Problem, prediction_TC: Tensor, options: ObjectiveConfig
) -> Loss:
    """Weighted error of the target tokens of a pack, float32.

    It is a mean over features, then a sum over tokens (`token`) or over samples' means (`sample`).
    Weights of the objective and of the data multiply errors and leave the counts: a weight of 2
    has the gradient of two copies of the sample, and the others' gradients stay as they are.
    """
    error_TC = prediction_TC.float() - problem.target_TC
    huber = options.loss is LossKind.HUBER
    error_TC = pseudo_huber(error_TC, c=options.huber_c) if huber else error_TC.square()
    if problem.anchor_TC is not None:
        away_TC = (prediction_TC.float() - problem.anchor_TC).square()
        error_TC = error_TC + options.drift_weight * away_TC
    error_T = error_TC.mean(-1)
    error_T = error_T * problem.weight_N[batch.segment_T]
    if batch.weight_T is not None:
        error_T = error_T * batch.weight_T
    # Not a product: on padding the prediction means nothing, and may be NaN.
    error_T = error_T.where(batch.is_target_T, 0)
    if options.loss_mean is LossMean.TOKEN:
        counts = batch.shared_loss_tokens
    else:
        tokens_N = to_device(torch.tensor(batch.loss_tokens, dtype=torch.float32), error_T.device)
        error_T = error_T / tokens_N[batch.segment_T]
        counts = [int(batch.share.index == 0)] * batch.num_samples  # once over context ranks
    count_N = to_device(torch.tensor(counts, dtype=torch.int), error_T.device)
    return Loss(
        total=error_T.sum(),
        count=count_N.sum(dtype=torch.int),
        error_T=error_T,
        count_N=count_N,
    )


PackLoss = tuple[Loss, PackedBatch]  # this rank's part of a pack and its loss


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoss:
    """This rank's terms of the sums of a step over all ranks of the run."""

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
        """The error. Waits for the device, as all below do."""
        return self.sums[0].item()

    @property
    def count(self) -> float:
        """The divisor of the error."""
        return self.sums[1].item()

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Keys of the samples whose error is NaN or infinite."""
        return () if math.isfinite(self.total) else tuple(_not_finite(self.packs))


def _not_finite(losses: Sequence[PackLoss]) -> Iterator[str]:
    for loss, pack in losses:
        bad_T = ~loss.error_T.isfinite()
        yield from (pack.keys[owner] for owner in pack.segment_T[bad_T].unique().tolist())


def forward_backward(
    model: ModelAndOptimizer,
    items: Sequence[Item],
    *,
    config: RunConfig,
    references: References | None = None,
) -> RankLoss:
    """First half of a step: this replica's packs in, gradients of the global batch out."""
    with timed(OPTIMIZER):
        zero_gradients(model.chunks, model.optimizer)
    with timed(BACKWARD):  # the seconds that no part inside claims
        losses = run_schedule(model.chunks, items, options=config.objective, references=references)
    return RankLoss.of(losses)


def prepare_update(model: ModelAndOptimizer) -> Tensor:
    """The squared norm [1] of the gradient; nobody waits for it."""
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
) -> Update:
    """Second half of a step: gradients -> updated weights and average.

    `number` counts updates from 1; `loss` is that of the global batch; `grad_norm` is the root of
    what `prepare_update` has returned, if it was called. Where the loss or the gradient is not
    finite, nothing changes on any rank.
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
            model.ema.update(number)
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

    Returns the losses on the rank that counts them, nothing elsewhere. Gradients, unless
    `forward_only`, are those of the mean over the global batch.
    """
    module: Any = chunks[0].module
    mine = [rank_part(module, item) for item in items]
    if references is not None:
        mine = [
            (batch, with_references(batch, problem, references, pack))
            for pack, (batch, problem) in enumerate(mine)
        ]
    forward = partial(_forward, options=options)
    losses = run_pipeline(chunks, mine, forward, forward_only=forward_only)
    if not losses or module.groups.tp.rank() > 0:  # not the last stage, or a copy of its losses
        return []
    return [(loss, batch) for loss, (batch, _) in zip(losses, mine, strict=True)]


def _forward(
    items: Iterator[Item], model: torch.nn.Module, *, options: ObjectiveConfig
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Loss]]]:
    heartbeat("forward and backward pass")
    batch, problem = next(items)
    with timed(FORWARD):
        prediction_TC = model(problem.input_TC, problem.level_M, batch)

    def reduce(prediction_TC: Tensor) -> tuple[Tensor, Tensor, Loss]:
        with timed(FORWARD):
            loss = loss_of(batch, problem, prediction_TC, options)
        # Copied, because the schedule may scale the first in place.
        total, error_T = loss.total.detach().clone(), loss.error_T.detach()
        return loss.total, loss.count, replace(loss, total=total, error_T=error_T)

    return prediction_TC, reduce
