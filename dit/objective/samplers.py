"""Deterministic samplers: from noise down the ODE of an objective to whitened latents."""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.objective.objective import Objective, per_token, real_only
from dit.objective.problem import among_padding

Network = Callable[[Tensor, Tensor], Tensor]
"""(input_TC, level_N), both float32 -> raw output [T, C]; text and positions are its own affair."""


class Sampler(StrEnum):
    """How a step follows the slope."""

    EULER = "euler"  # one network call a step, first order
    HEUN = "heun"  # two, second order (arXiv:2206.00364, Algorithm 1 without churn)


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


def guided(conditional: Network, unconditional: Network, guidance: float) -> Network:
    """Classifier-free guidance: uncond + guidance * (cond - uncond), one call at guidance 1.

    Acts on raw outputs. Denoised latent and velocity are affine in them with the same state, so
    this equals guidance on either.
    """
    if guidance == 1:
        return conditional

    def network(input_TC: Tensor, level_N: Tensor) -> Tensor:
        cond_TC = conditional(input_TC, level_N).float()
        uncond_TC = unconditional(input_TC, level_N).float()
        return uncond_TC + guidance * (cond_TC - uncond_TC)

    return network


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

    def slope(state_TC: Tensor, noise_N: Tensor) -> Tensor:
        noise_T1 = per_token(noise_N, batch)
        input_TC = real_only(objective.network_input(state_TC, noise_T1), batch).float()
        raw_TC = network(input_TC, objective.network_level(noise_N).float())
        return objective.predict(state_TC, raw_TC.double(), noise_T1).slope_TC

    # float64 like the paper's own sampler: nothing beside the cost of the network, and rounding of
    # a state of size sigma_max = 80 would still be seen in the last steps, of size 0.002.
    state_TC = objective.start(noise_TC.double())
    for i in range(num_steps):
        step_T1 = per_token(level_SN[i + 1] - level_SN[i], batch)
        slope_TC = slope(state_TC, level_SN[i])
        if sampler is Sampler.HEUN and i + 1 < num_steps:
            ahead_TC = slope(state_TC + step_T1 * slope_TC, level_SN[i + 1])
            slope_TC = (slope_TC + ahead_TC) / 2
        state_TC = state_TC + step_T1 * slope_TC
    return real_only(objective.finish(state_TC), batch).float()
