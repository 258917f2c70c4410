"""Multistep solvers: second order with one network call a step.

They reuse the prediction of the step before.

Both integrate the part of the ODE that is linear in the state exactly, over the half log-SNR
lambda = ln(signal / noise):

    state' = (s' / s) state + a' (1 - e^-h) latent,    h = lambda' - lambda

where a and s are the factors of latent and noise in the state, and ' marks the end of the step.
Flow matching begins at a = 0, where lambda is minus infinity. There h is infinite, e^-h is 0, and
terms divided by h vanish, which is the correct limit.
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.objectives.objective import Prediction, per_token

Predict = Callable[[Tensor, Tensor], Prediction]
"""(state_TC, level_N) -> prediction of the network at this state."""


@dataclass(frozen=True, slots=True)
class LevelSchedule:
    """The levels that a solver visits; each sample has its own."""

    noise_SN: Tensor  # float64, falling to 0
    signal_SN: Tensor
    batch: PackedBatch

    @property
    def steps(self) -> int:
        return len(self.noise_SN) - 1

    def log_snr_step(self, i: int) -> Tensor:
        """The step h = lambda' - lambda of step i, [N]."""
        lambda_2N = self.signal_SN[i : i + 2].log() - self.noise_SN[i : i + 2].log()
        return lambda_2N[1] - lambda_2N[0]

    def per_token(self, value_N: Tensor) -> Tensor:
        return per_token(value_N, self.batch)

    def step(self, i: int, state_TC: Tensor, latent_TC: Tensor) -> Tensor:
        """State after step i, if the predicted latent is constant during the step."""
        ratio_N = self.noise_SN[i + 1] / self.noise_SN[i]
        return self.per_token(ratio_N) * state_TC + self.latent_factor(i) * latent_TC

    def latent_factor(self, i: int) -> Tensor:
        """Factor a' (1 - e^-h) of the latent in step i, [T, 1]."""
        return self.per_token(-self.signal_SN[i + 1] * torch.expm1(-self.log_snr_step(i)))


def dpm_solver(predict: Predict, state_TC: Tensor, levels: LevelSchedule) -> Tensor:
    """DPM-Solver++(2M): arXiv:2211.01095, Algorithm 2; the last step is of first order."""
    before_TC = None
    for i in range(levels.steps):
        now_TC = predict(state_TC, levels.noise_SN[i]).latent_TC
        latent_TC = now_TC
        if before_TC is not None and i + 1 < levels.steps:
            half_N = levels.log_snr_step(i) / levels.log_snr_step(i - 1) / 2
            latent_TC = now_TC + levels.per_token(half_N) * (now_TC - before_TC)
        state_TC = levels.step(i, state_TC, latent_TC)
        before_TC = now_TC
    return state_TC


def unipc(predict: Predict, state_TC: Tensor, levels: LevelSchedule) -> Tensor:
    """UniPC-2 with B(h) = e^h - 1: arXiv:2302.04867, Algorithms 5 and 7 (prediction of data)."""
    known: list[Tensor] = []  # predicted latents of the two newest steps
    start_TC = state_TC  # state at the start of the step before
    for i in range(levels.steps):
        now_TC = predict(state_TC, levels.noise_SN[i]).latent_TC
        if i > 0:
            state_TC = _corrected(levels, i - 1, start_TC, known, now_TC)
        known = [*known[-1:], now_TC]
        start_TC = state_TC
        state_TC = levels.step(i, state_TC, now_TC)
        if len(known) > 1 and i + 1 < levels.steps:
            slope_TC = (known[0] - now_TC) / levels.per_token(_step_ratio(levels, i))
            state_TC = state_TC + levels.latent_factor(i) * slope_TC / 2
    return state_TC


def _step_ratio(levels: LevelSchedule, i: int) -> Tensor:
    """-h(i - 1) / h(i), [N]: the ratio r of the paper, which is negative."""
    return -levels.log_snr_step(i - 1) / levels.log_snr_step(i)


def _corrected(
    levels: LevelSchedule, i: int, start_TC: Tensor, known: list[Tensor], end_TC: Tensor
) -> Tensor:
    """State after step i, corrected by the latent that was predicted at the end of the step.

    `known` are the latents [T, C] that were predicted at its start and, if any, a step before.
    """
    moved_TC = levels.step(i, start_TC, known[-1])
    ahead_TC = end_TC - known[-1]
    if len(known) == 1:
        return moved_TC + levels.latent_factor(i) * ahead_TC / 2
    h_N, ratio_N = -levels.log_snr_step(i), _step_ratio(levels, i)
    first_N = (torch.expm1(h_N) / h_N - 1) / torch.expm1(h_N)
    second_N = 2 * ((torch.expm1(h_N) / h_N - 1) / h_N - 0.5) / torch.expm1(h_N)
    behind_N = (second_N - first_N) / (ratio_N - 1)
    slope_TC = (known[0] - known[-1]) / levels.per_token(ratio_N)
    mixed_TC = levels.per_token(behind_N) * slope_TC
    mixed_TC = mixed_TC + levels.per_token(first_N - behind_N) * ahead_TC
    return moved_TC + levels.latent_factor(i) * mixed_TC
