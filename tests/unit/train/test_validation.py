"""Validation by quantile and kind: sums of what the model says of each sample."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import pytest
import torch

from dit.batch import FixedLevels
from dit.config import LossMean, ObjectiveConfig, ObjectiveName
from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import DiT
from dit.objectives.noise import draw_noise
from dit.objectives.pack_draws import CPU, Draw, pack_rng, with_null_inputs
from dit.objectives.registry import training_objective
from dit.objectives.training_target import validation_problem
from dit.train.metrics.interval_metrics import quantiles
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.validation import _mean_over_ranks, kind, validate
from tests.learning import tiny_run
from tests.packs import random_pack, tiny_model

# Grids in patches of two by two latent pixels; a video of 5 latent frames.
GRIDS = [[(1, 4, 4), (5, 2, 2)], [(1, 4, 4), (1, 8, 8), (1, 1, 1)]]
TEXTS = [[5, 2], [1, 3, 2]]
KINDS = ["image_8", "video8_4", "image_8", "image_16", "image_2"]


def _model(groups, config):
    return build_model_and_optimizer(config, groups, fill=partial(randomise, seed=2))


@pytest.fixture(params=list(LossMean))
def config(request):
    base = tiny_run(patch_spatial=2)
    return replace(base, objective=replace(base.objective, loss_mean=request.param))


def _packs(config):
    return [
        replace(random_pack(grids, texts, model=config.model), pack_id=number)
        for number, (grids, texts) in enumerate(zip(GRIDS, TEXTS, strict=True))
    ]


def test_losses_are_means_over_samples_of_their_quantile_and_kind(groups, config):
    model, objective = _model(groups, config), training_objective(config.objective)
    packs = _packs(config)
    found = validate(model, packs, objective=objective, config=config)

    errors, counts = {}, {}  # by quantile and sample, from the definition
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        for pack in packs:
            problem = validation_problem(objective, pack, seed=config.rng.seed, quantile=quantile)
            with torch.no_grad():
                raw = model.chunks[0](problem.input_TC, problem.level_M, pack)
            error_T = (raw - problem.target_TC).double().square().mean(-1)
            for sample, tokens in enumerate(pack.num_tokens):
                mine = error_T[pack.starts[sample] :][:tokens]
                by_token = config.objective.loss_mean is LossMean.TOKEN
                key = (quantile, pack.pack_id, sample)
                errors[key] = float(mine.sum() if by_token else mine.mean())
                counts[key] = tokens if by_token else 1

    def mean(chosen):
        keys = [key for key in errors if chosen(*key)]
        return sum(errors[key] for key in keys) / sum(counts[key] for key in keys)

    expected = {"val_loss": mean(lambda *_: True)}
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        name = f"val_loss_q{100 * quantile:.0f}"
        expected[name] = mean(lambda q, _p, _s, quantile=quantile: q == quantile)
    for name in set(KINDS):
        expected[f"val_loss_{name}"] = mean(lambda _q, p, s, name=name: KINDS[2 * p + s] == name)
    mine = {name: value for name, value in found.items() if "ema" not in name}
    assert mine == pytest.approx(expected, rel=1e-6)
    averaged = {name.replace("_ema", ""): v for name, v in found.items() if "ema" in name}
    assert averaged == mine  # before the first step


def _fixed(config, **validation):
    flow = replace(config.objective, name=ObjectiveName.FLOW)
    validation = replace(config.validation, fixed_levels=True, **validation)
    return replace(config, objective=flow, validation=validation)


def test_with_fixed_levels_each_sample_counts_once_at_its_own_level(groups, config):
    """0, 1/8, ..., 7/8, the mean over samples of the mean over tokens, for either `loss_mean`."""
    config = _fixed(config)
    model, objective = _model(groups, config), training_objective(config.objective)
    levels = ((7, 0), (3, 3, 4))
    pairs = zip(_packs(config), levels, strict=True)
    packs = [pack.with_method(FixedLevels(indices=of)) for pack, of in pairs]
    found = validate(model, packs, objective=objective, config=config)
    errors = []
    for pack in packs:
        rng = pack_rng(
            seed=config.rng.seed,
            step=0,
            pack_id=pack.pack_id,
            device=CPU,
            draw=Draw.VALIDATION_NOISE,
        )
        noise_TC = draw_noise(pack, rng)
        indices = pack.method(FixedLevels).indices
        t_N = torch.tensor(indices) / 8
        t_T1 = t_N[pack.segment_T, None]
        with torch.no_grad():
            x_TC = (1 - t_T1) * pack.latent_TC + t_T1 * noise_TC
            raw = model.chunks[0](x_TC * pack.is_real_T[:, None], 1000 * t_N, pack)
        error_T = (raw - (noise_TC - pack.latent_TC)).double().square().mean(-1)
        for n, tokens in enumerate(pack.num_tokens):
            errors.append((indices[n], float(error_T[pack.starts[n] :][:tokens].mean())))
    assert found["val_loss"] == pytest.approx(sum(e for _, e in errors) / 5, rel=1e-5)
    for k in (0, 3, 4, 7):
        mine = [e for level, e in errors if level == k]
        assert found[f"val_loss_k{k}"] == pytest.approx(sum(mine) / len(mine), rel=1e-5)
    names = {name for name in found if "_k" in name and "ema" not in name}
    assert names == {f"val_loss_k{k}" for k in (0, 3, 4, 7)}
    assert not any("_q" in name for name in found)


def test_captions_are_dropped_in_validation_where_it_is_asked_for_alone(groups, config):
    config = _fixed(config)
    model, objective = _model(groups, config), training_objective(config.objective)
    null = {"text": torch.randn(1, config.model.crossattn_emb_size)}
    pairs = zip(_packs(config), ((7, 0), (3, 3, 4)), strict=True)
    packs = [pack.with_method(FixedLevels(indices=of)) for pack, of in pairs]

    def loss(dropout):
        asked = _fixed(config, text_dropout=dropout)
        return validate(model, packs, objective=objective, config=asked, null=null)["val_loss"]

    bare = [with_null_inputs(pack, [True] * pack.num_samples, null) for pack in packs]
    without = validate(model, bare, objective=objective, config=config)["val_loss"]
    assert loss(1.0) == without != loss(0.0)
    assert loss(0.5) == loss(0.5) and loss(0.5) not in (loss(0.0), loss(1.0))


def test_a_second_evaluation_is_equal_to_the_last_bit_and_touches_nothing(groups, config):
    model, objective = _model(groups, config), training_objective(config.objective)
    before = [p.detach().clone() for p in model.chunks[0].parameters()]
    packs, state = _packs(config), torch.get_rng_state()
    one, again = (validate(model, packs, objective=objective, config=config) for _ in range(2))
    assert one == again
    assert torch.equal(state, torch.get_rng_state())
    assert model.chunks[0].training
    for old, new in zip(before, model.chunks[0].parameters(), strict=True):
        assert torch.equal(old, new)


def test_clips_without_sound_have_no_loss_of_it(groups) -> None:
    sums = {"val_loss": (3.0, 6.0), "val_loss_sound": (0.0, 0.0)}
    assert _mean_over_ranks(sums) == {"val_loss": 0.5}


def test_quantiles_are_middles_of_equal_parts():
    assert quantiles(1) == [0.5]
    assert quantiles(4) == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        ((1, 16, 16), "image_32"),
        ((1, 9, 30), "image_32"),
        ((21, 30, 52), "video32_64"),
        ((2, 1, 1), "video2_2"),
    ],
)
def test_kinds_have_sizes_of_latents(grid, name):
    assert kind(grid, tiny_model(patch_spatial=2)) == name


STD = 1.7  # of the data


def _uncorrelated(pack, seed):
    """The pack with data of deviation STD and no part of its noise; the variance of that."""
    noise_TC = draw_noise(
        pack,
        pack_rng(seed=seed, step=0, pack_id=pack.pack_id, device=CPU, draw=Draw.VALIDATION_NOISE),
    ).double()
    z_TC = pack.latent_TC.double()
    z_TC = z_TC - (z_TC * noise_TC).sum() / noise_TC.square().sum() * noise_TC
    z_TC = STD * z_TC / z_TC.square().mean().sqrt()
    return replace(pack, latent_TC=z_TC.float()), float(noise_TC.square().mean())


def _input_parts(name, quantile):
    """Data and noise in the network's input, from the definitions of both objectives' levels."""
    c, normal = ObjectiveConfig(name=name), NormalDist().inv_cdf(quantile)
    if name is ObjectiveName.EDM:
        sigma = math.exp(c.p_mean + c.p_std * normal)
        return (part / math.hypot(sigma, c.sigma_data) for part in (c.sigma_data, sigma))
    t = 1 / (1 + math.exp(-(c.logit_mean + c.logit_std * normal)))
    return 1 - t, t


@pytest.mark.parametrize("name", list(ObjectiveName))
def test_losses_of_the_best_network_for_gaussian_data_are_their_closed_form(
    groups, name, monkeypatch
):
    """Data and noise go to input and target by a matrix of determinant 1.

    So the input leaves (variance of data) (of noise) / (of input) of the target unknown.
    """
    config = tiny_run(extra_pos_embed=ExtraPosition.NONE)
    config = replace(config, objective=ObjectiveConfig(name=name))
    model, objective = (
        build_model_and_optimizer(config, groups),
        training_objective(config.objective),
    )
    pack = random_pack([(1, 40, 40)], [2], model=config.model)
    pack, noise = _uncorrelated(pack, config.rng.seed)
    data, expected, best = STD**2, {}, {}
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        a, b = _input_parts(name, quantile)
        variance = a * a * data + b * b * noise
        expected[f"val_loss_q{100 * quantile:.0f}"] = data * noise / variance
        c, d = (b, -a) if name is ObjectiveName.EDM else (-1, 1)  # data and noise in the target
        problem = validation_problem(objective, pack, seed=config.rng.seed, quantile=quantile)
        best[float(problem.level_M)] = (a * c * data + b * d * noise) / variance
    expected["val_loss"] = sum(expected.values()) / 5

    def oracle(_model, x_TC, level_N, _batch):
        return best[float(level_N)] * x_TC

    monkeypatch.setattr(DiT, "forward", oracle)
    found = validate(model, [pack], objective=objective, config=config)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
