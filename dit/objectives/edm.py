"""EDM (arXiv:2206.00364): state = sigma_data * latent + sigma * noise, preconditioned network.

Input and target of the network are a rotation of latent and noise. With a and b of `mixing`,

    input  = c_in * state                   =  a * latent + b * noise
    target = (data - c_skip * state) / c_out =  b * latent - a * noise

where data = sigma_data * latent. It follows that latent = a * input + b * target and
noise = b * input - a * target. The left-hand forms, of the paper's Table 1, lose all digits of
float32 at small sigma, where data and c_skip * state are almost equal. The right-hand forms are
exact up to rounding at every sigma.
"""

# C patch features, T packed tokens, N samples, M level rows (here those of the N samples),
# S + 1 levels of S sampler steps

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dit.batch import Problem, TokenStream
from dit.config import EdmConfig
from dit.objectives import timestep_sampling
from dit.objectives.objective import Prediction, per_token, real_only


class Mixing(NamedTuple):
    """Cosine a and sine b of the angle between latent and network input."""

    latent: Tensor  # a = sigma_data / sqrt(sigma² + sigma_data²)
    noise: Tensor  # b = sigma / sqrt(sigma² + sigma_data²)


def mixing(sigma: Tensor, *, sigma_data: float) -> Mixing:
    """Factors of latent and noise in the network input, [T, 1]; their squares sum to 1.

    `sigma` [T, 1] is the level of each token.
    """
    norm = (sigma.square() + sigma_data**2).sqrt()
    return Mixing(latent=sigma_data / norm, noise=sigma / norm)


def karras_levels(num_steps: int, *, sigma_min: float, sigma_max: float, rho: float) -> Tensor:
    """Noise levels sigma [S + 1] from `sigma_max` down to `sigma_min`, then 0, float64.

    Equation 5 of arXiv:2206.00364, with S = `num_steps`; equal to Diffusers' EDMEulerScheduler.
    """
    ramp_S = torch.linspace(0, 1, num_steps, dtype=torch.float64)
    first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return torch.cat([(first + ramp_S * (last - first)) ** rho, torch.zeros(1).double()])


@dataclass(frozen=True, slots=True)
class Edm:
    """The EDM objective, for training and sampling; its level is sigma, the noise's std."""

    config: EdmConfig

    def levels(self, quantile_N: Tensor, _num_tokens: Sequence[int], /) -> Tensor:
        c = self.config
        sigma_N = timestep_sampling.log_normal(quantile_N.double(), mean=c.p_mean, std=c.p_std)
        return sigma_N.float()

    def problem_at(self, batch: TokenStream, noise_N: Tensor, noise_TC: Tensor) -> Problem:
        sigma_N = noise_N.float()
        part = mixing(per_token(sigma_N, batch), sigma_data=self.config.sigma_data)
        latent_TC, noise_TC = batch.latent_TC.float(), noise_TC.float()
        return Problem(
            input_TC=real_only(part.latent * latent_TC + part.noise * noise_TC, batch),
            level_M=self.network_level(sigma_N),
            target_TC=real_only(part.noise * latent_TC - part.latent * noise_TC, batch),
            weight_N=torch.ones_like(sigma_N),  # lambda(sigma) * c_out² (Table 1) is 1
            noise_N=sigma_N,
        )

    def schedule(self, num_tokens: Sequence[int], *, num_steps: int) -> Tensor:
        c = self.config
        sigma_S = karras_levels(num_steps, sigma_min=c.sigma_min, sigma_max=c.sigma_max, rho=c.rho)
        return sigma_S[:, None].expand(-1, len(num_tokens))

    def start(self, noise_TC: Tensor) -> Tensor:
        # Diffusers' init_noise_sigma is sqrt(sigma_max² + 1), 8e-5 more at sigma_max = 80.
        return self.config.sigma_max * noise_TC

    def network_input(self, state_TC: Tensor, noise_T1: Tensor, /) -> Tensor:
        return state_TC / (noise_T1.square() + self.config.sigma_data**2).sqrt()

    def network_level(self, noise_N: Tensor) -> Tensor:
        return noise_N.log() / 4

    def predict(self, state_TC: Tensor, raw_TC: Tensor, noise_T1: Tensor) -> Prediction:
        """The latent, and the velocity (state - data) / sigma of Algorithm 1, line 4."""
        part = mixing(noise_T1, sigma_data=self.config.sigma_data)
        input_TC = self.network_input(state_TC, noise_T1)
        return Prediction(
            latent_TC=part.latent * input_TC + part.noise * raw_TC,
            velocity_TC=part.noise * input_TC - part.latent * raw_TC,
        )

    def signal(self, noise_N: Tensor) -> Tensor:
        return torch.full_like(noise_N, self.config.sigma_data)

    def finish(self, state_TC: Tensor) -> Tensor:
        return state_TC / self.config.sigma_data
