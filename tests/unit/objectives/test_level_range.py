"""A window of noise levels, against the exact conditional distribution of the levels inside."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import logit
from scipy.stats import kstest

from dit.config import (
    CheckpointConfig,
    FlowConfig,
    LevelDensity,
    ObjectiveConfig,
    Problems,
    TrainConfig,
    ValidationConfig,
)
from dit.config_loading import ConfigError, load_config
from dit.objectives.registry import check_covers_all_levels, training_objective
from dit.objectives.timestep_sampling import draw_quantiles
from dit.objectives.training_target import training_problem, validation_problem
from dit.train.metrics.interval_metrics import quantiles
from recipes.runs import dit_s
from tests.packs import run_config

RANGES = [(0.875, 1.0), (0.0, 0.875), (0.9, 1.0), (0.3, 0.31)]
DENSITIES = [
    {"density": LevelDensity.UNIFORM},
    {"density": LevelDensity.LOGIT_NORMAL, "logit_mean": 0.3, "logit_std": 0.7},
    {"density": LevelDensity.MODE, "mode_scale": 1.29},
    {"density": LevelDensity.MODE, "mode_scale": -1.0},
]
SHIFTS = [
    {},
    {"flow_shift": 5.0},
    {"flow_shift": 0.4},
    {"flow_shift": 2.0, "shift_base_tokens": 256},
]


def flow(**options) -> ObjectiveConfig:
    return ObjectiveConfig(name="flow", text_dropout=0.0, **options)


def share_below(t: float, config: FlowConfig, tokens: int) -> float:
    """P(level <= t) of all levels, from the papers' formulas."""
    s = config.flow_shift
    if config.shift_base_tokens is not None:
        s *= math.sqrt(tokens / config.shift_base_tokens)
    t = t / (s - (s - 1) * t)  # the inverse of the shift
    match config.density:
        case LevelDensity.UNIFORM:
            return t
        case LevelDensity.LOGIT_NORMAL:
            return NormalDist(config.logit_mean, config.logit_std).cdf(logit(t))
        case LevelDensity.MODE:
            scale = config.mode_scale
            u = brentq(lambda u: 1 - u - scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u) - t, 0, 1)
            return 1 - u


def share_inside(t: float, config: FlowConfig, tokens: int) -> float:
    """P(level <= t | level in the range)."""
    assert config.level_range is not None
    low, high = (share_below(end, config, tokens) for end in config.level_range)
    return (share_below(t, config, tokens) - low) / (high - low)


@pytest.mark.parametrize("level_range", RANGES, ids=str)
@pytest.mark.parametrize("shift", SHIFTS, ids=str)
@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_quantiles_are_those_of_the_levels_inside(density, shift, level_range) -> None:
    """Each sample of a pack with the shift of its own size."""
    config = flow(**density, **shift, level_range=level_range)
    quantile_N = torch.tensor([1e-9, 0.1, 0.5, 0.5, 0.9, 1 - 1e-9], dtype=torch.float64)
    tokens = (64, 4096, 256, 1024, 16, 128)
    t_N = training_objective(config).levels(quantile_N, tokens).numpy()
    low, high = level_range
    assert (t_N >= np.float32(low)).all() and (t_N <= np.float32(high)).all()
    for q, t, n in zip(quantile_N.tolist(), t_N.tolist(), tokens, strict=True):
        width = 2e-7 / (high - low)  # float32 of a level
        # Near its ends the density may be so low or so high that q or t says more.
        around = [share_inside(min(max(t + d, low), high), config, n) for d in (-1e-6, 1e-6)]
        assert around[0] - width <= q <= around[1] + width


@pytest.mark.parametrize("level_range", RANGES[:2], ids=str)
@pytest.mark.parametrize("shift", SHIFTS[1::2], ids=str)
@pytest.mark.parametrize("density", DENSITIES[:3], ids=str)
def test_drawn_levels_have_the_conditional_distribution(
    density, shift, level_range, make_pack
) -> None:
    config = flow(**density, **shift, level_range=level_range)
    batch = make_pack(grids=[(1, 4, 6)] * 1000, multiple=1)
    null = {"text": torch.zeros(1, 5)}
    _, problem = training_problem(
        training_objective(config), batch, seed=1, step=2, null=null, options=config
    )
    exact = np.vectorize(lambda t: share_inside(float(t), config, 24))
    inside_N = problem.noise_N.double().clamp(*level_range).numpy()
    assert kstest(inside_N, exact).pvalue > 1e-3
    assert torch.equal(problem.level_M, 1000 * problem.noise_N)


@pytest.mark.parametrize("count", [5, 8])
def test_validation_levels_lie_evenly_inside(count: int, make_pack) -> None:
    config = flow(**DENSITIES[1], flow_shift=5.0, level_range=(0.875, 1.0))
    objective, batch = training_objective(config), make_pack()
    levels = []
    for quantile in quantiles(count):
        problem = validation_problem(objective, batch, seed=1, quantile=quantile)
        assert len(set(problem.noise_N.tolist())) == 1
        levels.append(float(problem.noise_N[0]))
    shares = [share_inside(t, config, 6) for t in levels]
    assert shares == pytest.approx(quantiles(count), abs=1e-5)


@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_the_range_of_all_levels_changes_nothing(density) -> None:
    quantile_N = draw_quantiles(1000, torch.Generator().manual_seed(3))
    options = {**density, "flow_shift": 3.0}
    both = (training_objective(flow(**options, level_range=one)) for one in ((0.0, 1.0), None))
    whole, without = (objective.levels(quantile_N, (64,) * 1000) for objective in both)
    torch.testing.assert_close(whole, without, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "level_range", [(0.9, 0.1), (0.5, 0.5), (-0.1, 1.0), (0.5, 1.5), (math.nan, 1.0)], ids=str
)
def test_a_range_that_is_none_is_named(level_range) -> None:
    with pytest.raises(Problems, match=r"level_range=\[.* must be two rising levels t in \[0, 1\]"):
        flow(level_range=level_range)


def test_errors_name_key_and_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(dit_s(), overrides=["objective.level_range=[0.9, 1]"])
    assert "objective: level_range=[0.9, 1.0] needs flow matching" in str(caught.value)
    assert "set name=flow" in str(caught.value)
    narrow = training_objective(flow(logit_std=0.1, level_range=(0.999, 1.0)))
    with pytest.raises(ValueError, match=r"objective\.level_range=\[0\.999, 1\.0\] holds"):
        narrow.levels(torch.tensor([0.5]), (64,))


def test_one_expert_does_not_generate_alone() -> None:
    for level_range in ((0.875, 1.0), (0.0, 0.875), (0.002, 1.0)):
        with pytest.raises(Problems, match=r"objective\.level_range=.*checkpoints of both experts"):
            check_covers_all_levels(flow(level_range=level_range))
    for level_range in (None, (0.0, 1.0), (0.001, 1.0)):
        check_covers_all_levels(flow(level_range=level_range))
    groups = {
        "objective": flow(level_range=(0.875, 1.0)),
        "train": TrainConfig(eval_interval=1, eval_iters=1),
        "checkpoint": CheckpointConfig(save="runs/expert"),
    }
    without = run_config(**groups)
    with pytest.raises(Problems, match=r"level_range=\[0\.875, 1\.0\] .* validation\.num_captions"):
        replace(without, validation=ValidationConfig(num_captions=2))
