"""What the network learns: noise levels, preconditioning and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from dit.config.checks import at_least_one, check, given, numbers, positive, within

# s of the paper's `mode` map: beyond these it is not monotone (arXiv:2403.03206, Sec. 3.1).
MODE_SCALES = (-1.0, 2 / (math.pi - 2))


class ObjectiveName(StrEnum):
    """Which regression the network learns."""

    EDM = "edm"
    FLOW = "flow"


class LevelDensity(StrEnum):
    """Density from which flow matching draws t (arXiv:2403.03206, Sec. 3.1)."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"
    MODE = "mode"


class Weighting(StrEnum):
    """Weight of the flow-matching error at t."""

    NONE = "none"
    LINEAR = "linear"


class Sampler(StrEnum):
    """How a step of sampling follows the slope."""

    EULER = "euler"  # one network call a step, first order
    HEUN = "heun"  # two, second order (arXiv:2206.00364, Algorithm 1 without churn)
    DPMPP = "dpm++"  # one, second order, from the step before (arXiv:2211.01095, 2M)
    UNIPC = "unipc"  # one, second order, and a correction of the step before (arXiv:2302.04867)


class LossMean(StrEnum):
    """What counts once in the mean loss: a real token, or a sample."""

    TOKEN = "token"
    SAMPLE = "sample"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Noise levels, preconditioning and weights; symbols as in the papers."""

    name: ObjectiveName = ObjectiveName.EDM
    """The regression that the network learns: edm (arXiv:2206.00364) or flow (arXiv:2403.03206)."""
    loss_mean: LossMean = LossMean.TOKEN
    """What counts once in the mean loss: a real token, or a sample."""
    text_dropout: float = 0.1
    """Probability, per sample, that training sees the null text (classifier-free guidance)."""
    sigma_data: float = 0.5
    """EDM: standard deviation that latents are scaled to."""
    p_mean: float = 0.0
    """EDM: mean of ln(sigma) in training."""
    p_std: float = 1.0
    """EDM: standard deviation of ln(sigma) in training."""
    sigma_min: float = 0.002
    """EDM: smallest level of the samplers."""
    sigma_max: float = 80.0
    """EDM: largest level of the samplers."""
    rho: float = 7.0
    """EDM: curvature of the samplers' levels."""
    density: LevelDensity = LevelDensity.LOGIT_NORMAL
    """Flow: how t is drawn."""
    logit_mean: float = 0.0
    """Flow: mean of logit(t)."""
    logit_std: float = 1.0
    """Flow: standard deviation of logit(t)."""
    mode_scale: float = 1.29
    """Flow: s of the `mode` density."""
    flow_shift: float = 1.0
    """Flow: t becomes s t / (1 + (s - 1) t), in training and sampling; above 1 means more noise."""
    shift_base_tokens: int | None = None
    """Flow: with a number, the shift of a sample of T tokens is flow_shift * sqrt(T / number)."""
    timestep_scale: float = 1000.0
    """Flow: the network is told timestep_scale * t."""
    weighting: Weighting = Weighting.NONE
    """Flow: none, or 1 + flow_shift * t (linear)."""

    def __post_init__(self) -> None:
        low, high = MODE_SCALES
        check(
            (
                0 <= self.text_dropout <= 1,
                f"text_dropout={self.text_dropout} must lie in [0, 1]",
            ),
            (
                0 < self.sigma_min < self.sigma_max,
                f"sigma_min={self.sigma_min} must be positive and below sigma_max={self.sigma_max}",
            ),
            *positive(self, "sigma_data", "p_std", "rho"),
            *positive(self, "logit_std", "flow_shift", "timestep_scale"),
            (
                low <= self.mode_scale <= high,
                f"mode_scale={self.mode_scale} must lie in [{low}, {high:.4f}]:"
                " beyond, the mode density is not defined",
            ),
            *at_least_one(self, *given(self, "shift_base_tokens")),
            # What e^x and powers of float32 still hold.
            *(within(self, name, -50, 50) for name in ("p_mean", "logit_mean")),
            *(within(self, name, 1e-6, 50) for name in ("p_std", "logit_std")),
            *(within(self, name, 1e-6, 1e6) for name in ("sigma_data", "timestep_scale")),
            *(within(self, name, 1e-6, 1e6) for name in ("sigma_min", "sigma_max")),
            within(self, "rho", 0.1, 1000),
            within(self, "flow_shift", 1e-3, 1000),
            *numbers(self),
        )
