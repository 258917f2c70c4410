import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import kstest, norm

from dit.config import (
    MODE_SCALES,
    LevelDensity,
    ObjectiveConfig,
    ObjectiveName,
    Problems,
    TimeShift,
)
from dit.objectives.registry import training_objective
from dit.objectives.timestep_sampling import draw_quantiles, mode, shift_factors, shifted

COUNT = 20_000


def flow(**options) -> ObjectiveConfig:
    return ObjectiveConfig(name=ObjectiveName.FLOW, **options)


def drawn(config: ObjectiveConfig, tokens: int = 64):
    quantile_N = draw_quantiles(COUNT, torch.Generator().manual_seed(5))
    return training_objective(config).levels(quantile_N, (tokens,) * COUNT).numpy()


def mode_cdf(t: float, scale: float) -> float:
    """P(mode density <= t), from the paper's map u -> t, inverted by bisection."""

    def to_t(u: float) -> float:
        return 1 - u - scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u)

    return 1 - brentq(lambda u: to_t(u) - t, 0, 1)


def test_edm_sigma_is_log_normal() -> None:
    config = ObjectiveConfig(p_mean=-1.2, p_std=1.4)
    log_sigma = torch.from_numpy(drawn(config)).double().log()
    assert kstest(log_sigma.numpy(), norm(-1.2, 1.4).cdf).pvalue > 1e-3
    assert abs(log_sigma.mean() + 1.2) < 5 * 1.4 / COUNT**0.5
    assert abs(log_sigma.std() - 1.4) < 5 * 1.4 / (2 * COUNT) ** 0.5


def test_uniform_density() -> None:
    assert kstest(drawn(flow(density=LevelDensity.UNIFORM)), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.4])
def test_shifted_logit_normal_is_logit_normal_moved_by_ln_shift(shift: float) -> None:
    config = flow(logit_mean=0.3, logit_std=0.7, flow_shift=shift)
    exact = norm(0.3 + math.log(shift), 0.7)
    assert kstest(drawn(config), lambda t: exact.cdf(logit(t))).pvalue > 1e-3


@pytest.mark.parametrize("scale", [*MODE_SCALES, 0.0, 1.29])
def test_mode_density(scale: float) -> None:
    config = flow(density=LevelDensity.MODE, mode_scale=scale)
    t_N = drawn(config)[:2000]
    assert kstest(t_N, np.vectorize(lambda t: mode_cdf(t, scale))).pvalue > 1e-3


LTX2_SHIFT = {
    "density": LevelDensity.STRETCHED_LOGIT_NORMAL,
    "time_shift_type": TimeShift.EXPONENTIAL,
    **{"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024},
}


def stretched_levels(tokens: int, std: float, uniform_share: float) -> np.ndarray:
    """Levels in rising order, each as probable, from normal and uniform numbers in even steps."""
    mu = 0.95 + (min(tokens, 4096) - 1024) * (2.05 - 0.95) / (4096 - 1024)
    count = 200_000
    plain = round(count * (1 - uniform_share))
    normal = norm.ppf((np.arange(plain) + 0.5) / plain)
    ends = expit(mu + std * np.array([-2.5758, 3.0902]))
    level = (expit(mu + std * normal) - ends[0]) / (ends[1] - ends[0])
    level = np.clip(np.where(level < 1e-3, 2e-3 - level, level), 0, 1)
    rest = count - plain
    uniform = 1e-3 + (1 - 1e-3) * (np.arange(rest) + 0.5) / max(rest, 1)
    return np.sort(np.concatenate([level, uniform]))


@pytest.mark.parametrize(("std", "uniform_share"), [(1.0, 0.1), (0.6, 0.0)])
def test_stretched_logit_normal_density(std: float, uniform_share: float) -> None:
    """Few tokens, as of a sound, lie below the line's first point; mu is capped at its last."""
    config = flow(**LTX2_SHIFT, logit_std=std, uniform_share=uniform_share)
    for tokens in (126, 2500, 60_000):
        exact = stretched_levels(tokens, std, uniform_share)
        quantiles = [1e-4, 1e-3, 4e-3, 0.03, 0.3, 0.5, 0.9, 0.995, 0.9985, 1 - 2e-5]
        expected_N = exact[[int(q * len(exact)) for q in quantiles]]
        quantile_N, rows = torch.tensor(quantiles, dtype=torch.float64), (tokens,) * len(quantiles)
        t_N = training_objective(config).levels(quantile_N, rows).numpy()
        assert t_N == pytest.approx(expected_N, abs=1e-4)
        inside = exact[(exact >= 0.4) & (exact <= 0.8)]
        within = training_objective(replace(config, level_range=(0.4, 0.8)))
        found = float(within.levels(quantile_N[5:6], (tokens,))[0])
        assert found == pytest.approx(inside[len(inside) // 2], abs=1e-4)
    assert exact[-1] == 1 and t_N[-1] == 1


def test_stretched_logit_normal_with_one_shift_is_that_of_so_many_tokens() -> None:
    """The stretched density takes a constant shift, whatever the number of tokens."""
    by_tokens, q_N = flow(**LTX2_SHIFT), torch.linspace(0.01, 0.99, 5, dtype=torch.float64)
    wanted_N = training_objective(by_tokens).levels(q_N, (2560,) * 5)
    one = flow(density=LevelDensity.STRETCHED_LOGIT_NORMAL, flow_shift=math.exp(1.5))
    for tokens in (7, 50_000):
        found_N = training_objective(one).levels(q_N, (tokens,) * 5)
        torch.testing.assert_close(found_N, wanted_N)


@pytest.mark.parametrize("scale", [-1.01, 1.76, math.nan])
def test_mode_scale_out_of_range_names_key_and_range(scale: float) -> None:
    with pytest.raises(Problems, match=rf"mode_scale={scale} must lie in \[-1\.0, 1\.7519\]"):
        flow(mode_scale=scale)


def test_the_range_of_mode_scale_is_where_quantiles_keep_their_order() -> None:
    quantile_N = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    for inside, outside in zip(MODE_SCALES, (-1.001, MODE_SCALES[1] + 1e-3), strict=True):
        assert (mode(quantile_N, scale=inside).diff() > -1e-12).all()
        assert (mode(quantile_N, scale=outside).diff() < -1e-9).any()


@pytest.mark.parametrize("scale", [0.0, -1000.0, math.nan])
def test_the_network_is_told_a_level_that_grows_with_t(scale: float) -> None:
    with pytest.raises(Problems, match=f"timestep_scale={scale} must be positive"):
        flow(timestep_scale=scale)


@pytest.mark.parametrize(
    "config",
    [
        ObjectiveConfig(),
        flow(density=LevelDensity.UNIFORM),
        flow(flow_shift=3.0),
        flow(density=LevelDensity.MODE),
    ],
    ids=["edm", "uniform", "logit_normal", "mode"],
)
def test_quantiles_invert_the_draws(config: ObjectiveConfig) -> None:
    quantile_N = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    level_N = training_objective(config).levels(quantile_N, (64,) * 3)
    sample_N = torch.from_numpy(drawn(config))
    below_N = (sample_N[None] <= level_N[:, None]).double().mean(1)
    assert (below_N - quantile_N).abs().max() < 5 * 0.5 / COUNT**0.5
    assert (level_N.diff() > 0).all()


def test_mode_covers_the_whole_interval() -> None:
    ends = mode(torch.tensor([0.0, 1.0], dtype=torch.float64), scale=1.29)
    torch.testing.assert_close(ends, torch.tensor([0.0, 1.0], dtype=torch.float64))


def test_shift_by_tokens_follows_the_square_root() -> None:
    factor_N = shift_factors((64, 256, 1024), shift=2.0, base_tokens=256)
    assert factor_N.tolist() == [1.0, 2.0, 4.0]
    assert shift_factors((64, 256), shift=2.0, base_tokens=None).tolist() == [2.0, 2.0]
    half = torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close(
        shifted(half, factor_N), torch.tensor([1 / 2, 2 / 3, 4 / 5]).double(), rtol=1e-7, atol=0
    )
    objective = training_objective(flow(flow_shift=2.0, shift_base_tokens=256))
    t_N = objective.levels(torch.full((3,), 0.5), (64, 256, 1024))
    torch.testing.assert_close(t_N, torch.tensor([1 / 2, 2 / 3, 4 / 5]))


def test_shift_keeps_ends_and_inverts() -> None:
    t_N = torch.linspace(0, 1, 11, dtype=torch.float64)
    three = torch.tensor(3.0, dtype=torch.float64)
    moved_N = shifted(t_N, three)
    assert moved_N[0] == 0 and moved_N[-1] == 1 and (moved_N[1:-1] > t_N[1:-1]).all()
    torch.testing.assert_close(shifted(moved_N, 1 / three), t_N)


def test_quantiles_are_inside_the_open_interval() -> None:
    quantile_N = draw_quantiles(100_000, torch.Generator().manual_seed(0))
    assert quantile_N.min() > 0 and quantile_N.max() < 1
    extremes_N = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    for config in (ObjectiveConfig(), flow(), flow(density=LevelDensity.MODE)):
        level_N = training_objective(config).levels(extremes_N, (64, 64))
        assert level_N.isfinite().all() and (level_N >= 0).all()
        if config.name is ObjectiveName.EDM:
            assert (level_N > 0).all()
