"""One clipped update of the weights, and the learning-rate schedule."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from torch import Tensor

from dit.config import Decay, RunConfig
from dit.distributed.data_parallel import chained_optimizers
from dit.distributed.process_groups import device
from dit.train.optimizer.narrow_moments import only_decay_unmoved


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of update `step`, counted from 1.

    It rises from 0 to `lr` in the warm-up. Then it stays (constant), or falls to `min_lr`, which it
    reaches at update `config.decay_iters`.
    """
    warmup, horizon = config.scheduler.lr_warmup_iters, config.decay_iters
    peak, floor = config.optimizer.lr, config.optimizer.min_lr
    if step <= warmup:
        return peak * step / warmup
    done = min((step - warmup) / (horizon - warmup), 1.0)
    match config.scheduler.lr_decay_style:
        case Decay.CONSTANT:
            return peak
        case Decay.LINEAR:
            return peak + done * (floor - peak)
        case Decay.COSINE:
            return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: MegatronOptimizer, rate: float, *, weight_decay: float) -> None:
    """Sets learning rate and weight decay of each parameter group, times the group's factors."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Outcome of an optimizer step: the gradient norm, and whether the update was skipped."""

    grad_norm: float  # of the whole gradient, before clipping
    skipped: bool  # loss or norm was not finite, so nothing was changed


class UpdatesSome(Protocol):
    """Interface of an update of some weights, such as Muon's; AdamW updates all others."""

    def updated(self, *, norm: float) -> AbstractContextManager[None]:
        """A context that updates these weights, and in which the optimizer skips them.

        All ranks call it. `norm` is the norm of the whole gradient after clipping.
        """
        ...


_OF_SOME = "updates_some"


def update_by(optimizer: MegatronOptimizer, of_some: UpdatesSome) -> None:
    """Makes `clip_and_step` update some weights of `optimizer` by `of_some`."""
    setattr(optimizer, _OF_SOME, of_some)


@torch.no_grad()
def squared_norm(optimizer: MegatronOptimizer) -> Tensor:
    """The squared norm [1] of the whole gradient, float32, equal on every rank.

    Prepares the gradients for the update. The operations are those of Megatron-Core's
    `get_grad_norm_fp32`, without waiting for the device.
    """
    optimizer.prepare_grads()
    gradients = [
        grad for inner in chained_optimizers(optimizer) for grad in _gradients_of_norm(inner)
    ]
    total = torch.zeros(1, device=device())
    if gradients:
        overflow = torch.zeros(1, dtype=torch.int, device=device())
        norm, _ = clip_grads.multi_tensor_applier(
            clip_grads.l2_norm_impl, overflow, [gradients], False
        )
        total = norm**2.0
    dist.all_reduce(total, group=optimizer.get_grad_stats_parallel_group())
    return total


def _gradients_of_norm(optimizer: Any) -> list[Tensor]:
    """Gradients of this rank that count in the norm; each weight counts on one rank only."""
    if hasattr(optimizer, "get_grads_for_grad_norm"):  # Megatron-Core from 0.19 on
        return optimizer.get_grads_for_grad_norm()
    return optimizer.get_main_grads_for_grad_norm()


def clip_and_step(
    optimizer: MegatronOptimizer,
    *,
    clip_grad: float,
    loss: float = 0.0,
    grad_norm: float | None = None,
) -> Update:
    """Clips and applies the gradients, unless their norm or the loss is NaN or infinite.

    `loss` is the loss of the global batch, so that all ranks decide alike. `grad_norm` is the root
    of `squared_norm`, which is called if None is given. `clip_grad=0` does not clip.
    """
    norm = grad_norm if grad_norm is not None else squared_norm(optimizer).item() ** 0.5
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return Update(grad_norm=norm, skipped=True)
    if clip_grad > 0:
        for inner in chained_optimizers(optimizer):
            clip_grads.clip_grad_by_total_norm_fp32(
                inner.get_parameters(), max_norm=clip_grad, total_norm=norm
            )
    for inner in chained_optimizers(optimizer):
        if inner.config.use_precision_aware_optimizer:
            only_decay_unmoved(inner)
    of_some: UpdatesSome | None = getattr(optimizer, _OF_SOME, None)
    clipped = min(norm, clip_grad) if clip_grad > 0 else norm
    with of_some.updated(norm=clipped) if of_some is not None else nullcontext():
        optimizer.step_with_ready_grads()
    return Update(grad_norm=norm, skipped=False)
