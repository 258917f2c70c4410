"""The two protocols of an objective: TrainingObjective and SamplingPath.

A level is the noise level of a sample: sigma for EDM, t for flow matching.
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S sampler steps

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dit.batch import Problem, TokenStream


class TrainingObjective(Protocol):
    """A density of noise levels, and the regression that the network learns at each level."""

    def levels(self, quantile_N: Tensor, num_tokens: Sequence[int], /) -> Tensor:
        """Levels [N] at quantiles in (0, 1) of the training density, float32 on the CPU.

        Levels rise with their quantiles. `num_tokens` is the number of real tokens of each sample;
        flow matching may shift the level by it.
        """
        ...

    def problem_at(self, batch: TokenStream, noise_N: Tensor, noise_TC: Tensor) -> Problem:
        """The regression problem at levels `noise_N` [N], with standard normal noise `noise_TC`.

        It draws no random numbers.
        """
        ...

    def network_level(self, noise_N: Tensor) -> Tensor:
        """Timesteps [N] that the network embeds for the noise levels `noise_N`.

        `Problem.level_M` holds them.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The latent and velocity that a raw network output implies for a noisy state."""

    latent_TC: Tensor  # expected clean latent, whitened to std 1
    velocity_TC: Tensor  # dx / dlevel of the state x: the right-hand side of the sampling ODE


class SamplingPath(Protocol):
    """The path x(level) = signal(level) * latent + level * noise, from noise to latents.

    Arguments whose names end in `_T1` hold the level of each token. Because `predict` is affine in
    the raw output, classifier-free guidance can combine raw outputs for every objective.
    """

    def schedule(self, num_tokens: Sequence[int], *, num_steps: int) -> Tensor:
        """Levels [S + 1, N] that a sampler visits, falling to 0; float64 on the CPU."""
        ...

    def start(self, noise_TC: Tensor) -> Tensor:
        """State at the first level of the schedule, from standard normal noise."""
        ...

    def network_input(self, state_TC: Tensor, noise_T1: Tensor, /) -> Tensor:
        """Input of the network for `state_TC`, scaled as in `TrainingObjective.problem_at`."""
        ...

    def network_level(self, noise_N: Tensor) -> Tensor:
        """Timestep [N] that the network embeds for the noise levels `noise_N`, as in training."""
        ...

    def predict(self, state_TC: Tensor, raw_TC: Tensor, noise_T1: Tensor) -> Prediction:
        """Prediction from the raw network output `raw_TC` at `state_TC`; levels are above 0.

        Both tensors of the prediction must be affine in `raw_TC`.
        """
        ...

    def signal(self, noise_N: Tensor) -> Tensor:
        """Factor [N] of the latent in the state; the factor of the noise is the level itself."""
        ...

    def finish(self, state_TC: Tensor) -> Tensor:
        """The whitened latent [T, C] from the state `state_TC` at level 0."""
        ...


def real_only(values_TC: Tensor, batch: TokenStream) -> Tensor:
    """`values_TC` with padding set to zero, even where it was NaN."""
    return values_TC.masked_fill(~batch.is_real_T[:, None], 0)


def per_token(values_N: Tensor, batch: TokenStream) -> Tensor:
    """The value in `values_N` of the sample that owns each token, as a column [T, 1]."""
    return values_N[batch.segment_T, None]
