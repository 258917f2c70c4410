"""A tiny model that trains, for tests of what is saved of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from dit.config import DatasetConfig, RunConfig
from dit.distributed.data_parallel import zero_gradients
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.train.checkpoint.state_dict import DataState
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.optimizer.update import clip_and_step, set_learning_rate
from dit.train.step import RankLoss, run_schedule
from tests.packs import random_pack, tiny_model

DATA = DataState(
    position={"ranks": 1, "at": 3}, card={"format_version": 1}, null={"text": torch.ones(2, 8)}
)


def tiny_run(**model) -> RunConfig:
    """A run of milliseconds; `model` changes its network."""
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "crossattn_emb_size": 8}
    return RunConfig(
        model=tiny_model(**(sizes | {"adaln_lora_dim": 8} | model)),
        dataset=DatasetConfig(mock=True),
    )


def train(model: ModelAndOptimizer, config: RunConfig, first: int, last: int) -> list[float]:
    """Losses and gradient norms of steps `first` to `last`."""
    objective, numbers = training_objective(config.objective), []
    options = replace(config.objective, text_dropout=0.5)
    batch = random_pack([(1, 4, 4), (2, 3, 3)], [5, 2], model=config.model)
    for step in range(first, last + 1):
        item = training_problem(
            objective, batch, seed=1, step=step, null={"text": torch.zeros(1, 8)}, options=options
        )
        zero_gradients(model.chunks, model.optimizer)
        losses = run_schedule(model.chunks, [item], options=config.objective)
        rank_loss = RankLoss.of(losses)
        set_learning_rate(model.optimizer, 1e-2, weight_decay=0.1)
        update = clip_and_step(model.optimizer, clip_grad=1.0)
        if model.ema is not None:
            model.ema.update(step)
        # The first tensor rank alone counts.
        numbers += [rank_loss.total / max(rank_loss.count, 1), update.grad_norm]
    return numbers


def weights_and_averages(model: ModelAndOptimizer) -> list[torch.Tensor]:
    weights = [p.detach().clone() for p in model.chunks[0].parameters()]
    return weights + ([a.clone() for a in model.ema.averages] if model.ema else [])


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for a, b in zip(some, others, strict=True):
        assert torch.equal(a, b)
