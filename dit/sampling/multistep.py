"""Solvers that remember the step before: second order with one network call a step.

Both integrate exactly what is linear in the state, over lambda = ln(signal / noise):

    state' = (s' / s) state + a' (1 - e^-h) latent,    h = lambda' - lambda

with a, s the factors of latent and noise. Flow matching begins at a = 0, where lambda is minus
infinity: h is infinite there, e^-h is 0, and what is divided by h vanishes, as it should.
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
"""(state_TC, level_N) -> what the network says of it."""


@dataclass(frozen=True, slots=True)
class StepLevels:
    """The levels that are visited, for each sample its own."""

    noise_SN: Tensor  # float64, falling to 0
    signal_SN: Tensor
    batch: PackedBatch

    @property
    def steps(self) -> int:
        return len(self.noise_SN) - 1

    def stride(self, i: int) -> Tensor:
        """H of step i, [N]."""
        lambda_2N = self.signal_SN[i : i + 2].log() - self.noise_SN[i : i + 2].log()
        return lambda_2N[1] - lambda_2N[0]

    def on_tokens(self, value_N: Tensor) -> Tensor:
        return per_token(value_N, self.batch)

    def step(self, i: int, state_TC: Tensor, latent_TC: Tensor) -> Tensor:
        """Step i as if the predicted latent stayed what it is."""
        ratio_N = self.noise_SN[i + 1] / self.noise_SN[i]
        return self.on_tokens(ratio_N) * state_TC + self.gain(i) * latent_TC

    def gain(self, i: int) -> Tensor:
        """Factor of the latent in step i, [T, 1]."""
        return self.on_tokens(-self.signal_SN[i + 1] * torch.expm1(-self.stride(i)))


def dpm_solver(predict: Predict, state_TC: Tensor, line: StepLevels) -> Tensor:
    """DPM-Solver++(2M): arXiv:2211.01095, Algorithm 2; the last step is of first order."""
    before_TC = None
    for i in range(line.steps):
        now_TC = predict(state_TC, line.noise_SN[i]).latent_TC
        latent_TC = now_TC
        if before_TC is not None and i + 1 < line.steps:
            half_N = line.stride(i) / line.stride(i - 1) / 2
            latent_TC = now_TC + line.on_tokens(half_N) * (now_TC - before_TC)
        state_TC = line.step(i, state_TC, latent_TC)
        before_TC = now_TC
    return state_TC


def unipc(predict: Predict, state_TC: Tensor, line: StepLevels) -> Tensor:
    """UniPC-2 with B(h) = e^h - 1: arXiv:2302.04867, Algorithms 5 and 7 (prediction of data)."""
    known: list[Tensor] = []  # predicted latents of the steps so far
    start_TC = state_TC  # of the step before
    for i in range(line.steps):
        now_TC = predict(state_TC, line.noise_SN[i]).latent_TC
        if i > 0:
            state_TC = _corrected(line, i - 1, start_TC, known, now_TC)
        known = [*known[-1:], now_TC]
        start_TC = state_TC
        state_TC = line.step(i, state_TC, now_TC)
        if len(known) > 1 and i + 1 < line.steps:
            slope_TC = (known[0] - now_TC) / line.on_tokens(_backwards(line, i))
            state_TC = state_TC + line.gain(i) * slope_TC / 2
    return state_TC


def _backwards(line: StepLevels, i: int) -> Tensor:
    """Length of the step before step i over that of step i, negative."""
    return -line.stride(i - 1) / line.stride(i)


def _corrected(
    line: StepLevels, i: int, start_TC: Tensor, known: list[Tensor], end_TC: Tensor
) -> Tensor:
    """Step i once more, now that the latent is predicted at its end, too."""
    moved_TC = line.step(i, start_TC, known[-1])
    ahead_TC = end_TC - known[-1]
    if len(known) == 1:
        return moved_TC + line.gain(i) * ahead_TC / 2
    h_N, ratio_N = -line.stride(i), _backwards(line, i)
    first_N = (torch.expm1(h_N) / h_N - 1) / torch.expm1(h_N)
    second_N = 2 * ((torch.expm1(h_N) / h_N - 1) / h_N - 0.5) / torch.expm1(h_N)
    behind_N = (second_N - first_N) / (ratio_N - 1)
    slope_TC = (known[0] - known[-1]) / line.on_tokens(ratio_N)
    mixed_TC = line.on_tokens(behind_N) * slope_TC
    mixed_TC = mixed_TC + line.on_tokens(first_N - behind_N) * ahead_TC
    return moved_TC + line.gain(i) * mixed_TC
