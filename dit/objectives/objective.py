"""What EDM and flow matching have in common."""

# C patch features, T packed tokens, N samples, S + 1 levels of S sampler steps

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.config import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a raw network output says about a noisy state."""

    latent_TC: Tensor  # expected clean latent, whitened to std 1
    slope_TC: Tensor  # d state / d level: the right-hand side of the sampling ODE


class Objective(Protocol):
    """A path from data to noise, and the regression that learns to go back.

    Levels are sigma for EDM, t for flow matching. `_T1` arguments give a level per token.
    """

    @property
    def config(self) -> ObjectiveConfig: ...

    def levels(self, quantile_N: Tensor, num_tokens: Sequence[int], /) -> Tensor:
        """Levels at quantiles in (0, 1) of the training density, float32 on the CPU.

        `num_tokens` is each sample's number of real tokens, by which flow matching may shift.
        """
        ...

    def problem_at(self, batch: PackedBatch, noise_N: Tensor, noise_TC: Tensor) -> Problem:
        """The regression at given levels and given standard normal noise; draws nothing."""
        ...

    def schedule(self, num_tokens: Sequence[int], *, num_steps: int) -> Tensor:
        """Levels [S + 1, N] that a sampler visits, falling to 0; float64 on the CPU."""
        ...

    def start(self, noise_TC: Tensor) -> Tensor:
        """State at the first level of the schedule, from standard normal noise."""
        ...

    def network_input(self, state_TC: Tensor, noise_T1: Tensor, /) -> Tensor:
        """What the network is fed for a state; the same scaling as in `problem_at`."""
        ...

    def network_level(self, noise_N: Tensor) -> Tensor:
        """The number by which the network is told the level."""
        ...

    def predict(self, state_TC: Tensor, raw_TC: Tensor, noise_T1: Tensor) -> Prediction:
        """Reads the raw network output `raw_TC` at a state, all levels above 0."""
        ...

    def signal(self, noise_N: Tensor) -> Tensor:
        """Factor of the latent in the state, the noise's being its level."""
        ...

    def finish(self, state_TC: Tensor) -> Tensor:
        """Whitened latent from the state at level 0."""
        ...


def real_only(values_TC: Tensor, batch: PackedBatch) -> Tensor:
    """The same values with zeros on padding, whatever lay there."""
    return values_TC.masked_fill(~batch.is_real_T[:, None], 0)


def per_token(values_N: Tensor, batch: PackedBatch) -> Tensor:
    """Each sample's value beside its tokens, as a column [T, 1]."""
    return values_N[batch.segment_T, None]
