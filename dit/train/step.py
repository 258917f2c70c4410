"""One optimizer step: packs in, updated weights out."""

# T packed tokens, N samples, C patch features

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.config import LossMean
from dit.parallel.context import split_tokens
from dit.parallel.groups import device
from dit.parallel.stages import StageLink

Item = tuple[PackedBatch, Problem]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Sum of the errors over this rank's tokens, and its share of what that is divided by."""

    total: Tensor  # float32 scalar
    count: Tensor  # int32 scalar: real tokens, or samples


def loss_of(batch: PackedBatch, problem: Problem, prediction_TC: Tensor, mean: LossMean) -> Loss:
    """Weighted squared error of the real tokens of a pack, float32.

    A mean over features, then a sum over tokens (`token`) or over samples' means (`sample`).
    """
    error_T = (prediction_TC.float() - problem.target_TC).square().mean(-1)
    error_T = error_T * problem.weight_N[batch.segment_T]
    error_T = error_T.where(batch.is_real_T, 0)
    if mean is LossMean.TOKEN:
        count = sum(real for _, real in batch.shared_spans)
    else:
        tokens_N = torch.tensor(batch.num_tokens, dtype=torch.float32).to(error_T.device)
        error_T = error_T / tokens_N[batch.segment_T]
        count = batch.num_samples if batch.share.index == 0 else 0  # once over context ranks
    return Loss(
        total=error_T.sum(), count=torch.tensor(count, dtype=torch.int, device=error_T.device)
    )


def _forward(
    iterator: Iterator[Item], model: torch.nn.Module, *, mean: LossMean
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    batch, problem = next(iterator)
    prediction_TC = model(problem.input_TC, problem.level_N, batch)

    def reduce(prediction_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = loss_of(batch, problem, prediction_TC, mean)
        return loss.total, loss.count, torch.stack([loss.total.detach(), loss.count])

    return prediction_TC, reduce


def run_schedule(
    chunks: list[DistributedDataParallel],
    items: Sequence[Item],
    *,
    mean: LossMean,
    forward_only: bool = False,
) -> Tensor:
    """Runs Megatron-Core's schedule over this replica's packs, one micro-batch each.

    Returns [total error, count], float64: what this rank adds to their sums over all ranks of the
    run. Gradients, unless `forward_only`, are those of the mean over the global batch.
    """
    model: Any = chunks[0].module
    groups, virtual = model.groups, len(chunks)
    multiple = groups.tp.size() if model.config.sequence_parallel else 1
    mine = [split_tokens(*item, context=groups.cp, multiple=multiple) for item in items]
    if virtual > 1:  # the interleaved schedule takes multiples of the stages; spare results go
        mine += mine[:1] * (-len(mine) % groups.pp.size())
    reports = get_forward_backward_func()(
        forward_step_func=partial(_forward, mean=mean),
        data_iterator=[iter(mine) for _ in chunks] if virtual > 1 else iter(mine),
        model=[*chunks],
        num_microbatches=len(mine),
        seq_length=1,  # packs vary in length, so Megatron-Core sends each shape along
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=StageLink(groups.pp, model.config),
        pg_collection=groups,
    )
    if not reports or groups.tp.rank() > 0:  # an earlier stage, or a copy of another's numbers
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack(reports[: len(items)]).double().sum(0).cpu()


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What an optimizer step did."""

    grad_norm: float  # of the whole gradient, before clipping
    skipped: bool  # the norm was not finite, so nothing was changed


def update(optimizer: MegatronOptimizer, *, clip_grad: float) -> Update:
    """Clips and applies the gradients, unless their norm is NaN or infinite on any rank."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())  # the same on every rank
    if not math.isfinite(norm):
        return Update(grad_norm=norm, skipped=True)
    if clip_grad > 0:
        for inner in optimizer.chained_optimizers:  # type: ignore[attr-defined]
            clip_grad_by_total_norm_fp32(
                inner.get_parameters(), max_norm=clip_grad, total_norm=norm
            )
    optimizer.step_with_ready_grads()
    return Update(grad_norm=norm, skipped=False)


def sum_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Sums of each number over all ranks of the run, in float64."""
    total = torch.tensor(numbers, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return total.tolist()
