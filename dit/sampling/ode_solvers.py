"""Deterministic samplers: from noise down the ODE of an objective to whitened latents."""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import Sampler
from dit.objectives.objective import Objective, Prediction, per_token, real_only
from dit.objectives.training_target import among_padding
from dit.sampling.multistep import Predict, StepLevels, dpm_solver, unipc

Network = Callable[[Tensor, Tensor], Tensor]
"""(input_TC, level_N), both float32 -> raw output [T, C]; text and positions are its own affair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """How far the prompt leads, and at which levels."""

    scale: float = 1.0
    """1 is without guidance, and half the work."""
    between: tuple[float, float] | None = None
    """Levels told to the network, first and last with guidance (arXiv:2404.07724); None is all."""
    rescale: float = 0.0
    """Part of the way back to the deviation without guidance (arXiv:2305.08891, Sec. 3.4)."""

    def at(self, level_N: Tensor) -> Tensor:
        """Scale of each sample at its level."""
        scale_N = torch.full_like(level_N, self.scale)
        if self.between is None:
            return scale_N
        low, high = self.between
        return torch.where((level_N >= low) & (level_N <= high), scale_N, 1.0)


def initial_noise(batch: PackedBatch, seeds: Sequence[int]) -> Tensor:
    """Standard normal noise [T, C], float32, zero on padding.

    A sample's noise follows from its own seed and size: not from its neighbours, nor the device.

    Raises:
        ValueError: not one seed for each sample.
    """
    if len(seeds) != batch.num_samples:
        raise ValueError(f"{len(seeds)} seeds for a pack of {batch.num_samples} samples")
    width = batch.latent_TC.shape[1]
    drawn = [
        torch.randn(tokens, width, generator=torch.Generator("cpu").manual_seed(seed))
        for tokens, seed in zip(batch.num_tokens, seeds, strict=True)
    ]
    return among_padding(torch.cat(drawn).to(batch.latent_TC.device), batch)


def guided(
    conditional: Network, unconditional: Network, guidance: Guidance, batch: PackedBatch
) -> Network:
    """Classifier-free guidance: uncond + scale * (cond - uncond).

    Acts on raw outputs. Denoised latent and velocity are affine in them with the same state, so
    this equals guidance on either. Where no sample is guided, `unconditional` is not called.
    """
    if guidance.scale == 1:
        return conditional

    def network(input_TC: Tensor, level_N: Tensor) -> Tensor:
        cond_TC = conditional(input_TC, level_N).float()
        scale_N = guidance.at(level_N)
        if bool((scale_N == 1).all()):
            return cond_TC
        uncond_TC = unconditional(input_TC, level_N).float()
        mixed_TC = uncond_TC + per_token(scale_N, batch) * (cond_TC - uncond_TC)
        if guidance.rescale:
            factor_N = deviations(cond_TC, batch) / deviations(mixed_TC, batch)
            factor_N = torch.where(scale_N == 1, 1.0, factor_N)
            mixed_TC = mixed_TC * per_token(1 + guidance.rescale * (factor_N - 1), batch)
        return mixed_TC

    return network


def deviations(values_TC: Tensor, batch: PackedBatch) -> Tensor:
    """Standard deviation of all numbers of each sample, float32 [N]."""
    real_TC = real_only(values_TC.double(), batch)
    count_N = torch.tensor(batch.num_tokens).to(real_TC) * real_TC.shape[1]

    def sums(numbers_TC: Tensor) -> Tensor:
        return torch.zeros_like(count_N).index_add(0, batch.segment_T, numbers_TC.sum(-1))

    mean_N = sums(real_TC) / count_N
    centred_TC = real_only(real_TC - per_token(mean_N, batch), batch)
    return (sums(centred_TC.square()) / (count_N - 1)).sqrt().float()


@torch.no_grad()
def sample(
    objective: Objective,
    network: Network,
    noise_TC: Tensor,
    batch: PackedBatch,
    *,
    num_steps: int,
    sampler: Sampler = Sampler.HEUN,
) -> Tensor:
    """Whitened latents [T, C], float32, zero on padding, from standard normal `noise_TC`.

    Of `batch` only geometry counts, not its latents. The last step, to level 0, is Euler's: the
    network is not defined there.

    Raises:
        ValueError: no steps.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1")
    level_SN = objective.schedule(batch.num_tokens, num_steps=num_steps).to(noise_TC.device)

    def predict(state_TC: Tensor, noise_N: Tensor) -> Prediction:
        noise_T1 = per_token(noise_N, batch)
        input_TC = real_only(objective.network_input(state_TC, noise_T1), batch).float()
        raw_TC = network(input_TC, objective.network_level(noise_N).float())
        return objective.predict(state_TC, raw_TC.double(), noise_T1)

    # float64 like the paper's own sampler: nothing beside the cost of the network, and rounding of
    # a state of size sigma_max = 80 would still be seen in the last steps, of size 0.002.
    state_TC = objective.start(noise_TC.double())
    if sampler in (Sampler.EULER, Sampler.HEUN):
        state_TC = _follow(predict, state_TC, level_SN, batch, second=sampler is Sampler.HEUN)
    else:
        line = StepLevels(level_SN, objective.signal(level_SN), batch)
        solve = {Sampler.DPMPP: dpm_solver, Sampler.UNIPC: unipc}[sampler]
        state_TC = solve(predict, state_TC, line)
    return real_only(objective.finish(state_TC), batch).float()


def _follow(
    predict: Predict, state_TC: Tensor, level_SN: Tensor, batch: PackedBatch, *, second: bool
) -> Tensor:
    """LatentStride along the slope at their start, or along the mean of those at both ends."""
    steps = len(level_SN) - 1
    for i in range(steps):
        step_T1 = per_token(level_SN[i + 1] - level_SN[i], batch)
        slope_TC = predict(state_TC, level_SN[i]).slope_TC
        if second and i + 1 < steps:
            ahead_TC = predict(state_TC + step_T1 * slope_TC, level_SN[i + 1]).slope_TC
            slope_TC = (slope_TC + ahead_TC) / 2
        state_TC = state_TC + step_T1 * slope_TC
    return state_TC
