"""Samples weigh alike in a mean over them, padding moves nothing, captions fit their padding.

That a sample in a pack gives what it gives alone is asked in `tests/contract/test_parity.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.config import LossMean, ObjectiveConfig
from dit.models.dit.model import DiT
from dit.objectives.registry import training_objective
from dit.train.loss import loss_of
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, tiny_model

MODEL = tiny_model(num_layers=3)


def _model(groups, **changes) -> DiT:
    model = DiT(replace(MODEL, **changes), groups)
    randomise(model, seed=7)
    return model.train()


def test_mean_over_samples_weighs_each_sample_once():
    batch = random_pack([(1, 2, 2), (1, 4, 4)], [1, 1], model=MODEL)
    objective = training_objective(ObjectiveConfig())
    problem = objective.problem_at(batch, torch.ones(2), torch.randn(batch.latent_TC.shape))
    # Sample 0 is wrong by 1 everywhere, sample 1 by 3; padding by anything.
    off_T = torch.tensor([1.0, 3.0])[batch.segment_T]
    off_T[~batch.is_real_T] = 1e6
    prediction_TC = problem.target_TC + off_T[:, None]
    by_sample = loss_of(batch, problem, prediction_TC, ObjectiveConfig(loss_mean=LossMean.SAMPLE))
    by_token = loss_of(batch, problem, prediction_TC, ObjectiveConfig())
    assert by_sample.total / by_sample.count == pytest.approx((1 + 9) / 2)
    assert by_token.total / by_token.count == pytest.approx((4 * 1 + 16 * 9) / 20)


def test_padding_moves_nothing(groups):
    model, level_N = _model(groups), torch.tensor([0.1, 0.2, 0.3])
    batch = random_pack([(2, 3, 3), (1, 2, 2), (1, 5, 4)], [4, 4, 4], model=MODEL)
    latent_TC = batch.latent_TC.clone()
    latent_TC[~batch.is_real_T] = 1e3
    with torch.no_grad():
        before = model(batch.latent_TC, level_N, batch)
        after = model(latent_TC, level_N, replace(batch, latent_TC=latent_TC))
    assert torch.equal(before[batch.is_real_T], after[batch.is_real_T])


def test_caption_longer_than_its_padding_is_refused(groups):
    model = _model(groups, text_pad_to=3)
    batch = random_pack([(1, 2, 2)], [4], model=MODEL)
    with pytest.raises(ValueError, match=r"4 tokens, more than model.text_pad_to=3"):
        model(batch.latent_TC, torch.zeros(1), batch)
