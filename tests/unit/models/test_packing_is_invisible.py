"""A packed sample gives the same prediction, loss and gradient as the same sample alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.config import LossMean, ObjectiveConfig, ObjectiveName, Recompute, RecomputeMethod
from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import DiT
from dit.models.layers import packed_attention
from dit.objectives.edm import Edm
from dit.objectives.registry import training_objective
from dit.train.loss import loss_of
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, single, tiny_model
from tests.plain_kernel import attend_as_a_gpu

GRIDS = [(1, 4, 6), (3, 2, 5), (1, 1, 1), (2, 8, 3), (1, 4, 6), (5, 3, 3)]
TEXTS = [9, 1, 4, 30, 9, 2]
FPS = [float("nan"), 24.0, float("nan"), 8.0, float("nan"), 30.0]
MODEL = tiny_model(num_layers=3)


def _model(groups, **changes) -> DiT:
    model = DiT(replace(MODEL, **changes), groups)
    randomise(model, seed=7)
    return model.train()


def _noise(batch, objective):
    """Levels at both ends of the range and between, and noise, for each sample."""
    generator = torch.Generator().manual_seed(3)
    noise_TC = torch.randn(batch.latent_TC.shape, generator=generator)
    if isinstance(objective, Edm):
        c = objective.config
        return torch.tensor([c.sigma_min, c.sigma_max, 0.5, 1.0, 3.0, 0.1]), noise_TC
    return torch.tensor([1e-5, 1.0, 0.5, 0.25, 0.75, 0.9]), noise_TC


@pytest.mark.parametrize("name", list(ObjectiveName))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": Recompute.FULL, "recompute_num_layers": 2},
        {
            "recompute_granularity": Recompute.FULL,
            "recompute_method": RecomputeMethod.BLOCK,
            "extra_pos_embed": ExtraPosition.LEARNABLE,
            "max_size": (8, 16, 16),
        },
        {"recompute_granularity": Recompute.SELECTIVE},
        {"text_pad_to": 32, "concat_padding_mask": True},
    ],
    ids=["plain", "recompute", "learnable", "selective", "cosmos"],
)
@pytest.mark.parametrize("attend", [None, attend_as_a_gpu], ids=["cpu", "gpu"])
def test_sample_in_a_pack_equals_sample_alone(groups, monkeypatch, name, changes, attend):
    if attend is not None:
        monkeypatch.setattr(packed_attention, "attention_for", lambda *of: attend)
    model = _model(groups, **changes)
    objective = training_objective(ObjectiveConfig(name=name))
    batch = random_pack(GRIDS, TEXTS, model=MODEL, fps=FPS)
    noise_N, noise_TC = _noise(batch, objective)
    problem = objective.problem_at(batch, noise_N, noise_TC)

    prediction_TC = model(problem.input_TC, problem.level_M, batch)
    whole = loss_of(batch, problem, prediction_TC, ObjectiveConfig())
    whole.total.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    total, count = 0.0, 0
    for i in range(batch.num_samples):
        alone, rows = single(batch, i), slice(*batch.starts[i : i + 2])
        mine = objective.problem_at(alone, noise_N[i : i + 1], noise_TC[rows])
        torch.testing.assert_close(mine.input_TC, problem.input_TC[rows])
        single_TC = model(mine.input_TC, mine.level_M, alone)
        real = slice(0, alone.real_tokens)
        torch.testing.assert_close(single_TC[real], prediction_TC[rows][real], rtol=1e-5, atol=1e-5)
        loss = loss_of(alone, mine, single_TC, ObjectiveConfig())
        loss.total.backward()
        total, count = total + loss.total.item(), count + int(loss.count)
    assert count == int(whole.count) == batch.real_tokens
    assert total == pytest.approx(whole.total.item(), rel=1e-5)
    for n, p in model.named_parameters():
        error = (p.grad - gradients[n]).norm() / gradients[n].norm()
        assert gradients[n].norm() > 0, f"{n} has no gradient"
        assert error < 1e-5, f"{n}: {error}"


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
