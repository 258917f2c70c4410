"""Parameter counts of the named sizes, and operations counted by torch itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.models.dit.family import FAMILY
from dit.models.dit.model import DiT
from dit.models.layers.per_sample import PerSample
from dit.sizing.flops import pack_forward_flops, training_flops
from dit.train.loss import loss_of
from dit.train.model_and_optimizer import initialise, randomise
from tests.packs import random_pack, tiny_model

TINY = tiny_model()
ZERO = FAMILY.weights.starts_at_zero


@pytest.mark.parametrize("changes", [{}, {"text_pad_to": 16, "concat_padding_mask": True}])
def test_flops_equal_those_that_torch_counts(groups, changes):
    config = replace(TINY, **changes)
    model = DiT(config, groups)
    randomise(model, seed=1)
    # No padding: torch cannot know which tokens count.
    batch = random_pack([(1, 4, 4), (2, 4, 4), (1, 4, 4)], [5, 7, 5], model=config, multiple=8)
    # The counter has no formula for the CPU's fused attention, so that one runs unfused.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch.latent_TC, torch.zeros(3), batch)
    assert counter.get_total_flops() == pack_forward_flops(config, batch)
    assert training_flops(config, batch) == 3 * pack_forward_flops(config, batch)


def test_padding_counts_nothing():
    grids, texts = [(1, 3, 3), (1, 5, 1)], [2, 3]
    tight = random_pack(grids, texts, model=TINY, multiple=1)
    loose = random_pack(grids, texts, model=TINY, multiple=64)
    assert pack_forward_flops(TINY, tight) == pack_forward_flops(TINY, loose)


def test_initial_model_is_the_identity_and_predicts_zero(groups):
    model = DiT(TINY, groups)
    initialise(model, seed=1, std=None, zero=ZERO)
    batch = random_pack([(1, 4, 4)], [5], model=TINY)
    assert (model(batch.latent_TC, torch.zeros(1), batch) == 0).all()
    layout = PerSample.of(batch.segment_T)
    blocks = model.embed(batch.latent_TC, torch.zeros(1), batch, layout)
    # Zero gates still come from the level's own embedding, which is shared by all layers.
    blocks["adaln_shift"] = torch.zeros_like(blocks["adaln_shift"])
    conditions = model.conditions(blocks, batch, layout)
    h_TD = blocks["hidden"]
    torch.testing.assert_close(model.decoder(h_TD, conditions), h_TD)


def test_initial_weights_follow_from_the_seed_alone(groups):
    first, second, other = (DiT(TINY, groups) for _ in range(3))
    initialise(first, seed=1, std=None, zero=ZERO)
    torch.manual_seed(99)
    initialise(second, seed=1, std=None, zero=ZERO)
    initialise(other, seed=2, std=None, zero=ZERO)
    weights = first.state_dict()["patches.weight"]
    assert torch.equal(weights, second.state_dict()["patches.weight"])
    assert not torch.equal(weights, other.state_dict()["patches.weight"])
    layers = first.state_dict()
    names = [f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in (0, 1)]
    assert not torch.equal(layers[names[0]], layers[names[1]])


def test_every_weight_has_a_gradient_from_the_second_step_on(groups):
    from dit.config import ObjectiveConfig
    from dit.objectives.registry import training_objective

    model = DiT(TINY, groups)
    initialise(model, seed=1, std=None, zero=ZERO)
    batch = random_pack([(1, 4, 4), (2, 3, 3)], [5, 2], model=TINY)
    objective = training_objective(ObjectiveConfig())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    problem = objective.problem_at(
        batch, torch.tensor([0.3, 2.0]), torch.randn(batch.latent_TC.shape)
    )
    for _ in range(4):
        optimizer.zero_grad()
        prediction_TC = model(problem.input_TC, problem.level_M, batch)
        loss_of(batch, problem, prediction_TC, ObjectiveConfig()).total.backward()
        optimizer.step()
    assert not [n for n, p in model.named_parameters() if not p.grad.norm() > 0]
