"""Held-out loss: the same packs with the same noise at every evaluation."""

from __future__ import annotations

import torch

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.objective import Objective, validation_problem
from dit.parallel.groups import device
from dit.parallel.watch import doing
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
    total = count = 0.0
    # A few at a time, enough to fill a pipeline, so that memory does not grow with eval_iters.
    at_once = config.model.pipeline_model_parallel_size
    for first in range(0, len(packs), at_once):
        doing("validation")
        items = [
            (batch, validation_problem(objective, batch, seed=config.rng.seed))
            for batch in (pack.to(device()) for pack in packs[first : first + at_once])
        ]
        mean = config.objective.loss_mean
        report = run_schedule(learner.chunks, items, mean=mean, forward_only=True)
        total, count = total + report.total, count + report.count
    for chunk in learner.chunks:
        chunk.train()
    total, count = sum_over_ranks([total, count])
    return total / count
