"""Flow matching (arXiv:2210.02747; rectified flow, arXiv:2209.03003).

state = (1 - t) * latent + t * noise; the network learns the velocity noise - latent.
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S sampler steps

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.config import FlowConfig, LevelDensity, Weighting
from dit.objectives import timestep_sampling
from dit.objectives.objective import Prediction, per_token, real_only

LAST_LEVEL = 1 / 1000  # Diffusers: 1 / num_train_timesteps


def linear_levels(factor_N: Tensor, *, num_steps: int) -> Tensor:
    """Levels [S + 1, N] from 1 to 0, those of FlowMatchEulerDiscreteScheduler(shift=factor).

    Even steps from 1 to 1/1000 are shifted; then comes 0. Diffusers shifts the last step twice,
    because its `sigma_min` is shifted already. We do the same, so that an exported model generates
    the same pictures there.
    """
    ramp_S1 = torch.linspace(0, 1, num_steps, dtype=torch.float64)[:, None]
    last_N = timestep_sampling.shifted(torch.tensor(LAST_LEVEL, dtype=torch.float64), factor_N)
    t_SN = timestep_sampling.shifted(1 + ramp_S1 * (last_N - 1), factor_N)
    return torch.cat([t_SN, torch.zeros_like(t_SN[:1])])


@dataclass(frozen=True, slots=True)
class FlowMatching:
    """A `TrainingObjective` and a `SamplingPath`; the level is t in [0, 1], the noise's share."""

    config: FlowConfig

    def shift(self, num_tokens: Sequence[int]) -> Tensor:
        """Shift of each sample [N], float64 on the CPU."""
        c = self.config
        return timestep_sampling.shift_factors(
            num_tokens, shift=c.flow_shift, base_tokens=c.shift_base_tokens
        )

    def levels(self, quantile_N: Tensor, num_tokens: Sequence[int], /) -> Tensor:
        c, q_N = self.config, quantile_N.double()
        match c.density:
            case LevelDensity.UNIFORM:
                t_N = q_N
            case LevelDensity.LOGIT_NORMAL:
                t_N = timestep_sampling.logit_normal(q_N, mean=c.logit_mean, std=c.logit_std)
            case LevelDensity.MODE:
                t_N = timestep_sampling.mode(q_N, scale=c.mode_scale)
        return timestep_sampling.shifted(t_N, self.shift(num_tokens)).float()

    def problem_at(self, batch: PackedBatch, noise_N: Tensor, noise_TC: Tensor) -> Problem:
        t_N, latent_TC, noise_TC = noise_N.float(), batch.latent_TC.float(), noise_TC.float()
        state_TC = torch.lerp(latent_TC, noise_TC, per_token(t_N, batch))
        return Problem(
            input_TC=real_only(state_TC, batch),
            level_M=self.network_level(t_N),
            target_TC=real_only(noise_TC - latent_TC, batch),
            weight_N=self.weight(t_N),
            noise_N=t_N,
        )

    def weight(self, t_N: Tensor) -> Tensor:
        """Weight of the squared error at t, [N]."""
        match self.config.weighting:
            case Weighting.NONE:
                return torch.ones_like(t_N)
            case Weighting.LINEAR:
                return 1 + self.config.flow_shift * t_N

    def schedule(self, num_tokens: Sequence[int], *, num_steps: int) -> Tensor:
        return linear_levels(self.shift(num_tokens), num_steps=num_steps)

    def start(self, noise_TC: Tensor) -> Tensor:
        return noise_TC

    def network_input(self, state_TC: Tensor, _noise_T1: Tensor, /) -> Tensor:
        return state_TC

    def network_level(self, noise_N: Tensor) -> Tensor:
        return self.config.timestep_scale * noise_N

    def predict(self, state_TC: Tensor, raw_TC: Tensor, noise_T1: Tensor) -> Prediction:
        return Prediction(latent_TC=state_TC - noise_T1 * raw_TC, velocity_TC=raw_TC)

    def signal(self, noise_N: Tensor) -> Tensor:
        return 1 - noise_N

    def finish(self, state_TC: Tensor) -> Tensor:
        return state_TC
