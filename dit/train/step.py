"""One optimizer step: packs in, updated weights out."""

# T packed tokens, N samples, C patch features

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.config import LossMean, RunConfig
from dit.distributed.model_parallel import StageLink, split_tokens
from dit.distributed.watchdog.monitor import heartbeat
from dit.train.metrics.step_metrics import BACKWARD, FORWARD, OPTIMIZER, timing
from dit.train.optimizer import Update, learning_rate, set_learning_rate, update

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer


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


Item = tuple[PackedBatch, Problem]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Sum of the errors over this rank's tokens, and its share of what that is divided by."""

    total: Tensor  # float32 scalar
    count: Tensor  # int32 scalar: real tokens, or samples
    error_T: Tensor  # float32, what each token adds to `total`
    count_N: Tensor  # int32, what each sample adds to `count`

    def of_samples(self, batch: PackedBatch) -> Tensor:
        """Error and count of each sample, float64 [N, 2]."""
        error_N = torch.zeros(batch.num_samples, dtype=torch.float64, device=self.error_T.device)
        error_N.index_add_(0, batch.segment_T, self.error_T.double())
        return torch.stack([error_N, self.count_N.double()], dim=1)


def loss_of(batch: PackedBatch, problem: Problem, prediction_TC: Tensor, mean: LossMean) -> Loss:
    """Weighted squared error of the real tokens of a pack, float32.

    A mean over features, then a sum over tokens (`token`) or over samples' means (`sample`).
    """
    error_T = (prediction_TC.float() - problem.target_TC).square().mean(-1)
    error_T = error_T * problem.weight_N[batch.segment_T]
    error_T = error_T.where(batch.is_real_T, 0)
    if mean is LossMean.TOKEN:
        counts = [real for _, real in batch.shared_spans]
    else:
        tokens_N = torch.tensor(batch.num_tokens, dtype=torch.float32)
        tokens_N = tokens_N.to(error_T.device, non_blocking=True)
        error_T = error_T / tokens_N[batch.segment_T]
        counts = [int(batch.share.index == 0)] * batch.num_samples  # once over context ranks
    count_N = torch.tensor(counts, dtype=torch.int).to(error_T.device, non_blocking=True)
    return Loss(
        total=error_T.sum(),
        count=count_N.sum(dtype=torch.int),
        error_T=error_T,
        count_N=count_N,
    )


PackLoss = tuple[Loss, PackedBatch]  # this rank's part of a pack and its loss


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoss:
    """What this rank adds to the sums of a step over all ranks of the run."""

    total: float = 0.0  # error
    count: float = 0.0  # what the error is to be divided by
    not_finite: tuple[str, ...] = ()  # keys of the samples whose error is NaN or infinite
    measured: tuple[PackLoss, ...] = ()  # of its packs, in their order

    @classmethod
    def of(cls, losses: Sequence[PackLoss]) -> RankLoss:
        if not losses:
            return cls()
        numbers = [torch.stack([loss.total, loss.count]) for loss, _ in losses]
        total, count = torch.stack(numbers).double().sum(0).tolist()
        bad = () if math.isfinite(total) else _not_finite(losses)
        return cls(total=total, count=count, not_finite=tuple(bad), measured=tuple(losses))


def _not_finite(losses: Sequence[PackLoss]) -> Iterator[str]:
    for loss, pack in losses:
        bad_T = ~loss.error_T.isfinite()
        yield from (pack.keys[owner] for owner in pack.segment_T[bad_T].unique().tolist())


def _forward(
    iterator: Iterator[Item], model: torch.nn.Module, *, mean: LossMean
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Loss]]]:
    heartbeat("forward and backward pass")
    batch, problem = next(iterator)
    with timing(FORWARD):
        prediction_TC = model(problem.input_TC, problem.level_N, batch)

    def reduce(prediction_TC: Tensor) -> tuple[Tensor, Tensor, Loss]:
        with timing(FORWARD):
            loss = loss_of(batch, problem, prediction_TC, mean)
        # Copied, because the schedule may scale the first in place.
        total, error_T = loss.total.detach().clone(), loss.error_T.detach()
        return loss.total, loss.count, replace(loss, total=total, error_T=error_T)

    return prediction_TC, reduce


def run_schedule(
    chunks: list[DistributedDataParallel],
    items: Sequence[Item],
    *,
    mean: LossMean,
    forward_only: bool = False,
) -> list[PackLoss]:
    """Runs Megatron-Core's schedule over this replica's packs, one micro-batch each.

    Returns the losses on the rank that counts them, nothing elsewhere. Gradients, unless
    `forward_only`, are those of the mean over the global batch.
    """
    model: Any = chunks[0].module
    groups, virtual = model.groups, len(chunks)
    multiple = groups.tp.size() if model.config.sequence_parallel else 1
    mine = [split_tokens(*item, share=model.context.share, multiple=multiple) for item in items]
    if virtual > 1:  # the interleaved schedule takes multiples of the stages; spare results go
        mine += mine[:1] * (-len(mine) % groups.pp.size())
    shapes = [model.hidden_shape(batch) for batch, _ in mine]
    losses = get_forward_backward_func()(
        forward_step_func=partial(_forward, mean=mean),
        data_iterator=[iter(mine) for _ in chunks] if virtual > 1 else iter(mine),
        model=[*chunks],
        num_microbatches=len(mine),
        seq_length=1,  # packs vary in length: `StageLink` knows the shape of each
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=StageLink(groups.pp, model.config, shapes),
        pg_collection=groups,
    )
    if not losses or groups.tp.rank() > 0:  # an earlier stage, or a copy of another's numbers
        return []
    return [(loss, batch) for loss, (batch, _) in zip(losses, mine[: len(items)], strict=False)]
