"""What the network learns: the distribution of noise levels, preconditioning and loss weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from dit.config.checks import at_least_one, check, given, numbers, positive, within
from dit.config.inlining import INLINED

MODE_SCALES = (-1.0, 2 / (math.pi - 2))
"""Values of s for which the `mode` map is monotone (arXiv:2403.03206, Sec. 3.1)."""


class ObjectiveName(StrEnum):
    """The objectives that come with this project; `OBJECTIVES` has every registered one."""

    EDM = "edm"
    FLOW = "flow"


class LevelDensity(StrEnum):
    """Density from which flow matching draws t (arXiv:2403.03206, Sec. 3.1)."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"
    MODE = "mode"


class Weighting(StrEnum):
    """Weight of the squared error of flow matching at t."""

    NONE = "none"
    LINEAR = "linear"


class Sampler(StrEnum):
    """Solver of the sampling ODE."""

    EULER = "euler"  # one network call a step, first order
    HEUN = "heun"  # two calls a step, second order (arXiv:2206.00364, Algorithm 1 without churn)
    DPMPP = "dpm++"  # one call a step, second order, multistep (arXiv:2211.01095, 2M)
    UNIPC = "unipc"  # one call a step, second order, predictor-corrector (arXiv:2302.04867)


class LossMean(StrEnum):
    """What counts once in the mean loss: a real token, or a sample."""

    TOKEN = "token"
    SAMPLE = "sample"


@dataclass(frozen=True, kw_only=True, slots=True)
class EdmConfig:
    """Options of EDM; symbols as in arXiv:2206.00364."""

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
    """EDM: exponent of the samplers' levels (Eq. 5)."""

    def __post_init__(self) -> None:
        low, high = self.sigma_min, self.sigma_max
        check(
            (
                0 < low < high,
                f"sigma_min={low} must be positive and below sigma_max={high}",
            ),
            *positive(self, "sigma_data", "p_std", "rho"),
            # Limits within which e^x and powers are finite and not zero in float32.
            within(self, "p_mean", -50, 50),
            within(self, "p_std", 1e-6, 50),
            *(within(self, name, 1e-6, 1e6) for name in ("sigma_data", "sigma_min", "sigma_max")),
            within(self, "rho", 0.1, 1000),
            *numbers(self),
        )

    @property
    def summary(self) -> str:
        """The most important options in one line."""
        return f"ln sigma ~ N({self.p_mean:g}, {self.p_std:g}²), sigma_data {self.sigma_data:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """Options of flow matching; symbols as in arXiv:2403.03206."""

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
            *positive(self, "logit_std", "flow_shift", "timestep_scale"),
            (
                low <= self.mode_scale <= high,
                f"mode_scale={self.mode_scale} must lie in [{low}, {high:.4f}]:"
                " beyond, the mode density is not defined",
            ),
            *at_least_one(self, *given(self, "shift_base_tokens")),
            # Limits within which e^x and powers are finite and not zero in float32.
            within(self, "logit_mean", -50, 50),
            within(self, "logit_std", 1e-6, 50),
            within(self, "timestep_scale", 1e-6, 1e6),
            within(self, "flow_shift", 1e-3, 1000),
            *numbers(self),
        )

    @property
    def summary(self) -> str:
        """The most important options in one line."""
        return f"t {self.density}, shift {self.flow_shift:g}, weight {self.weighting}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Noise levels, preconditioning and weights; symbols as in the papers."""

    name: str = ObjectiveName.EDM
    """The regression that the network learns: edm (arXiv:2206.00364) or flow (arXiv:2403.03206)."""
    loss_mean: LossMean = LossMean.TOKEN
    """What counts once in the mean loss: a real token, or a sample."""
    text_dropout: float = 0.1
    """Probability, per sample, that training sees the null text (classifier-free guidance)."""
    edm: EdmConfig = field(default_factory=EdmConfig, metadata=INLINED)
    """Options of EDM; their keys are `objective.sigma_data` and so on."""
    flow: FlowConfig = field(default_factory=FlowConfig, metadata=INLINED)
    """Options of flow matching; their keys are `objective.density` and so on."""

    def __post_init__(self) -> None:
        check(
            (
                self.name in OBJECTIVES,
                f"name={self.name} is no known objective; use {', '.join(OBJECTIVES)}",
            ),
            (
                0 <= self.text_dropout <= 1,
                f"text_dropout={self.text_dropout} must lie in [0, 1]",
            ),
            *numbers(self),
        )

    @property
    def summary(self) -> str:
        """The objective and its most important options in one line, for `--dry-run`."""
        return f"{self.name}, {OBJECTIVES[self.name](self)}"


OBJECTIVES: dict[str, Callable[[ObjectiveConfig], str]] = {
    "edm": lambda config: config.edm.summary,
    "flow": lambda config: config.flow.summary,
}
"""Every `objective.name`, with what `--dry-run` says of its options.

`dit.objectives.REGISTRY` has the same names with the parts that need torch; `register` adds to
both.
"""
