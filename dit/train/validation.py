"""Held-out loss: the same packs with the same noise at every evaluation."""

from __future__ import annotations

import torch

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.objective import Objective, validation_problem
from dit.parallel.groups import device
from dit.train.learner import Learner
from dit.train.step import run_schedule, sum_over_ranks


@torch.no_grad()
def validate(
    learner: Learner, packs: list[PackedBatch], *, objective: Objective, config: RunConfig
) -> dict[str, float]:
    """`val_loss`, and `val_loss_ema` where there is an average: means over all ranks' packs.

    Noise follows from the seed and the pack, captions are never dropped, and nothing that training
    reads is touched.
    """
    with learner.settled():
        losses = {"val_loss": _mean_loss(learner, packs, objective, config)}
        if learner.ema is not None:
            with learner.ema.as_weights(learner.chunks):
                losses["val_loss_ema"] = _mean_loss(learner, packs, objective, config)
    return losses


def _mean_loss(
    learner: Learner, packs: list[PackedBatch], objective: Objective, config: RunConfig
) -> float:
    for chunk in learner.chunks:
        chunk.eval()
    report = torch.zeros(2, dtype=torch.float64)
    for pack in packs:  # one at a time, so that memory does not grow with eval_iters
        batch = pack.to(device())
        item = (batch, validation_problem(objective, batch, seed=config.rng.seed))
        mean = config.objective.loss_mean
        report += run_schedule(learner.chunks, [item], mean=mean, forward_only=True).cpu()
    for chunk in learner.chunks:
        chunk.train()
    total, count = sum_over_ranks(report.tolist(), learner.groups.dp_cp)
    return total / count
