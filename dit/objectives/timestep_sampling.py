"""Densities of the noise level (timestep) as inverse CDFs, and shifts of levels.

Training and validation share `log_normal`, `logit_normal`, `stretched_logit_normal` and `mode`,
which map quantiles to levels: uniform random quantiles in training, fixed ones in validation. All
functions compute in float64 on the CPU: N numbers for a pack cost nothing, and a uniform float32
number is 0 once in 16 million draws, which would be a level of 0.
"""

# N samples in a pack, S steps of a sampler

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dit.config import TimeShift

# Tokens and steps of FLUX.2's mu, as in `compute_empirical_mu` of Diffusers' Flux2Pipeline.
_OF_10_STEPS = (8.73809524e-05, 1.89833333)  # slope of mu in tokens, and mu at 0 tokens
_OF_200_STEPS = (0.00016927, 0.45666666)
_FEW_TOKENS = 4300
# Constants of ShiftedLogitNormalTimestepSampler in Lightricks' trainer of LTX-2.
_STRETCHED_FROM, _STRETCHED_TO = -2.5758, 3.0902  # normal deviates: quantiles 0.5 % and 99.9 %
_LEAST_STRETCHED = 1e-3


def draw_quantiles(count: int, rng: torch.Generator) -> Tensor:
    """Uniform numbers [count] in the open interval (0, 1), float64; `rng` is a CPU generator."""
    uniform_N = torch.rand(count, generator=rng, dtype=torch.float64)
    return uniform_N.clamp(
        min=2.0**-53
    )  # the smallest step of rand; a quantile of 0 would give sigma = 0


def log_normal(quantile_N: Tensor, *, mean: float, std: float) -> Tensor:
    """Levels sigma [N] with ln(sigma) ~ N(mean, std²): EDM (arXiv:2206.00364), Table 1."""
    return (mean + std * torch.special.ndtri(quantile_N)).exp()


def logit_normal(quantile_N: Tensor, *, mean: float, std: float) -> Tensor:
    """Levels t [N] with logit(t) ~ N(mean, std²): arXiv:2403.03206, Sec. 3.1."""
    return (mean + std * torch.special.ndtri(quantile_N)).sigmoid()


def mode(quantile_N: Tensor, *, scale: float) -> Tensor:
    """Levels t [N] of a density with heavy tails: arXiv:2403.03206, Sec. 3.1, "Mode Sampling".

    The paper's map falls from t = 1 at u = 0 to t = 0 at u = 1, so the quantile q of t is the map's
    value at u = 1 - q. The map is monotone for scales within `dit.config.MODE_SCALES`.
    """
    u_N = 1 - quantile_N
    return 1 - u_N - scale * ((math.pi / 2 * u_N).cos().square() - 1 + u_N)


def logit_normal_quantile(t: Tensor, *, mean: float, std: float) -> Tensor:
    """Quantiles [N] of the levels `t` [N]: the fraction of draws of `logit_normal` below t."""
    return torch.special.ndtr((t.logit() - mean) / std)


def mode_quantile(t: Tensor, *, scale: float) -> Tensor:
    """Quantiles [N] of the levels `t` [N] in the density of `mode`, whose inverse is no formula."""
    return _inverse(lambda quantile: mode(quantile, scale=scale), t)


def stretched_logit_normal(
    quantile: Tensor, factor_N: Tensor, *, mean: float, std: float, uniform_share: float
) -> Tensor:
    """Levels at `quantile`, [N] or [S, 1], of the density of `stretched_logit_normal_quantile`."""
    told = {"mean": mean, "std": std, "uniform_share": uniform_share}
    quantile, _ = torch.broadcast_tensors(quantile, factor_N)
    return _inverse(lambda t: stretched_logit_normal_quantile(t, factor_N, **told), quantile)


def stretched_logit_normal_quantile(
    t: Tensor, factor_N: Tensor, *, mean: float, std: float, uniform_share: float
) -> Tensor:
    """Quantiles of the levels `t` in Lightricks' density for LTX-2, with shifts `factor_N` [N].

    A shifted logit-normal level is stretched, so that its quantiles 0.5 % and 99.9 % become 0 and
    1. A level above 1 is 1, and one below 0.001 is reflected there. A share `uniform_share` of all
    levels is uniform on [0.001, 1].
    """
    told = {"mean": mean, "std": std}
    ends = torch.tensor((_STRETCHED_FROM, _STRETCHED_TO), dtype=torch.float64)
    low_N, high_N = (shifted((mean + std * end).sigmoid(), factor_N) for end in ends)

    def below(stretched: Tensor) -> Tensor:
        level = (low_N + stretched * (high_N - low_N)).clamp(0, 1)
        return logit_normal_quantile(shifted(level, 1 / factor_N), **told)

    normal = torch.where(t < 1, below(t) - below(2 * _LEAST_STRETCHED - t), torch.ones_like(t))
    uniform = (t - _LEAST_STRETCHED) / (1 - _LEAST_STRETCHED)
    share = torch.lerp(normal, uniform, uniform_share)
    return share.where(t > _LEAST_STRETCHED, torch.zeros_like(t))


def _inverse(rising: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Numbers of [0, 1] at which the function `rising` is `value`, bisected to the last bit."""
    low, high = torch.zeros_like(value), torch.ones_like(value)
    # Each pass halves the interval; float64 has 53 bits below 1.
    for _ in range(54):
        middle = (low + high) / 2
        is_above = rising(middle) > value
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    return (low + high) / 2


def shifted(t: Tensor, factor: Tensor) -> Tensor:
    """The levels `t` shifted by s: s t / (1 + (s - 1) t) (arXiv:2403.03206, Sec. 5.3.2, Eq. 23).

    `factor` s is [N]; t is [N], one number for all samples, or [S, N] or [S, 1] for steps.
    """
    return factor * t / (1 + (factor - 1) * t)


def shift_factors(num_tokens: Sequence[int], *, shift: float, base_tokens: int | None) -> Tensor:
    """Shift of each sample [N], float64: constant, or growing with the square root of its tokens.

    Noise averages out over more tokens, so the same t destroys less of a larger picture. A shift
    proportional to sqrt(tokens) compensates (arXiv:2403.03206, Sec. 5.3.2).
    """
    tokens_N = torch.tensor(num_tokens, dtype=torch.float64)
    growth_N = (tokens_N / base_tokens).sqrt() if base_tokens else torch.ones_like(tokens_N)
    return shift * growth_N


def shift_factors_of_mu(
    num_tokens: Sequence[int],
    kind: TimeShift,
    *,
    base: tuple[int, float],
    most: tuple[int, float],
) -> Tensor:
    """Shift of each sample [N], float64: exp(mu) or mu, where mu is linear in its tokens.

    `base` and `most` are two points (tokens, mu) of the line, which extends beyond them. Mu is that
    of `calculate_shift` in Diffusers' FluxPipeline; exp(mu) and mu are the two kinds of
    `time_shift` in its FlowMatchEulerDiscreteScheduler.
    """
    (first, low), (last, high) = base, most
    slope = (high - low) / (last - first)
    mu_N = low + slope * (torch.tensor(num_tokens, dtype=torch.float64) - first)
    return mu_N.exp() if kind is TimeShift.EXPONENTIAL else mu_N


def empirical_shift_factors(num_tokens: Sequence[int], *, num_steps: int) -> Tensor:
    """Shift of each sample [N], float64: exp(mu) by its tokens and by `num_steps`.

    Mu is linear in the tokens and is interpolated between lines for 10 and 200 steps; above 4,300
    tokens the line for 200 steps serves any number of steps. Source: `compute_empirical_mu` of
    Diffusers' Flux2Pipeline.
    """
    tokens_N = torch.tensor(num_tokens, dtype=torch.float64)
    few_N, many_N = (slope * tokens_N + start for slope, start in (_OF_10_STEPS, _OF_200_STEPS))
    mu_N = torch.lerp(few_N, many_N, (num_steps - 10) / 190)
    return torch.where(tokens_N > _FEW_TOKENS, many_N, mu_N).exp()
