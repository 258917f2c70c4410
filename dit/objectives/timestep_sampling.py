"""Densities of the noise level as inverse CDFs, so that training and validation share them.

A level is drawn as quantile -> level: the same function turns uniform random numbers into training
levels and chosen quantiles into the fixed levels of a validation. All in float64 on the CPU: N
numbers a pack cost nothing, and a float32 uniform is 0 once in 16 million draws, a level of zero.
"""

# N samples in a pack

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def draw_quantiles(count: int, rng: torch.Generator) -> Tensor:
    """`count` uniform numbers in the open interval (0, 1), float64; `rng` is a CPU generator."""
    uniform_N = torch.rand(count, generator=rng, dtype=torch.float64)
    return uniform_N.clamp(min=2.0**-53)  # rand's smallest step: 0 would be sigma = 0


def log_normal(quantile_N: Tensor, *, mean: float, std: float) -> Tensor:
    """ln(sigma) ~ N(mean, std²): EDM (arXiv:2206.00364), Table 1, "Noise distribution"."""
    return (mean + std * torch.special.ndtri(quantile_N)).exp()


def logit_normal(quantile_N: Tensor, *, mean: float, std: float) -> Tensor:
    """logit(t) ~ N(mean, std²): arXiv:2403.03206, Sec. 3.1, "Logit-Normal Sampling"."""
    return (mean + std * torch.special.ndtri(quantile_N)).sigmoid()


def mode(quantile_N: Tensor, *, scale: float) -> Tensor:
    """Heavy tails: arXiv:2403.03206, Sec. 3.1, "Mode Sampling with Heavy Tails".

    The paper's map falls from 1 at u = 0 to 0 at u = 1, so quantile q of t lies at u = 1 - q. It
    falls everywhere for scales within `dit.config.MODE_SCALES`.
    """
    u_N = 1 - quantile_N
    return 1 - u_N - scale * ((math.pi / 2 * u_N).cos().square() - 1 + u_N)


def shifted(t: Tensor, factor: Tensor) -> Tensor:
    """Shift s: t becomes s t / (1 + (s - 1) t) (arXiv:2403.03206, Sec. 5.3.2, Eq. 23)."""
    return factor * t / (1 + (factor - 1) * t)


def shift_factors(num_tokens: Sequence[int], *, shift: float, base_tokens: int | None) -> Tensor:
    """Shift of each sample, float64: constant, or growing with the square root of its tokens.

    More tokens average the noise out, so that the same t destroys less of a larger picture:
    a shift that goes with sqrt(tokens) keeps it equal (arXiv:2403.03206, Sec. 5.3.2).
    """
    tokens_N = torch.tensor(num_tokens, dtype=torch.float64)
    growth_N = (tokens_N / base_tokens).sqrt() if base_tokens else torch.ones_like(tokens_N)
    return shift * growth_N
