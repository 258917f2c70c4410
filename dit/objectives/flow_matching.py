"""Flow matching (arXiv:2210.02747; rectified flow, arXiv:2209.03003).

state = (1 - t) * latent + t * noise; the network learns the velocity noise - latent, or predicts
the latent, with a weight that makes its error equal to the velocity's (arXiv:2511.13720).
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S sampler steps

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dit.batch import Problem, TokenStream
from dit.config import (
    EdmConfig,
    FlowConfig,
    FlowPrediction,
    LevelDensity,
    LevelSpacing,
    SamplingLevels,
    Weighting,
)
from dit.objectives import timestep_sampling
from dit.objectives.edm import karras_levels
from dit.objectives.objective import Prediction, per_token, real_only

LAST_LEVEL = 1 / 1000  # Diffusers: 1 / num_train_timesteps
RHO = 7.0  # Diffusers: fixed in _convert_to_karras
BETA = 0.6  # Diffusers: alpha and beta of _convert_to_beta
NEAR_ONE = 1e-6  # Diffusers: eps of UniPCMultistepScheduler.set_timesteps
NEAR_NOISE = 0.025  # Diffusers: threshold_noise of linear_quadratic_schedule
LOGITS = (-7.5, 9.0)  # Diffusers: half of logsnr_min and logsnr_max of _logit_normal_sigmas
# Smallest t by which the error of a predicted latent is divided, as in the code of
# arXiv:2511.13720.
NEAR_CLEAN = 0.05
# Smallest probability of `level_range`. Quantiles near 1 are 1e-16 apart, so such a range still has
# 1e7 different quantiles.
LEAST_MASS = 1e-9


def even_levels(
    factor_N: Tensor,
    last_N: Tensor,
    *,
    num_steps: int,
    terminal: float | None = None,
    spacing: LevelSpacing | None = None,
) -> Tensor:
    """Levels [S + 1, N] that fall from 1 in even steps to `last_N`, shifted by `factor_N`, then 0.

    If `terminal` is set, the shifted levels are stretched to end at `terminal`, as shift_terminal
    of FlowMatchEulerDiscreteScheduler does. A single level is 1 and is not stretched; Diffusers
    returns NaN. If `spacing` is set, the levels between the first and the last are replaced by
    `respaced`.
    """
    ramp_S1 = torch.linspace(0, 1, num_steps, dtype=torch.float64)[:, None]
    t_SN = timestep_sampling.shifted(1 + ramp_S1 * (last_N - 1), factor_N)
    if terminal is not None and num_steps > 1:
        t_SN = 1 - (1 - t_SN) * ((1 - terminal) / (1 - t_SN[-1]))
    if spacing is not None:
        t_SN = respaced(t_SN, spacing)
    return torch.cat([t_SN, torch.zeros_like(t_SN[:1])])


def respaced(t_SN: Tensor, spacing: LevelSpacing) -> Tensor:
    """Levels [S, N] that begin and end like `t_SN`, with the levels between spaced by `spacing`.

    This is `_convert_to_karras`, `_convert_to_exponential` and `_convert_to_beta` of Diffusers'
    FlowMatchEulerDiscreteScheduler, with t in place of sigma. All levels are above 0.
    """
    first_N, last_N = t_SN[0], t_SN[-1]
    ramp_S1 = torch.linspace(0, 1, len(t_SN), dtype=torch.float64)[:, None]
    match spacing:
        case LevelSpacing.KARRAS:
            return torch.lerp(first_N ** (1 / RHO), last_N ** (1 / RHO), ramp_S1) ** RHO
        case LevelSpacing.EXPONENTIAL:
            return torch.lerp(first_N.log(), last_N.log(), ramp_S1).exp()
        case LevelSpacing.BETA:
            from scipy.special import betaincinv  # scikit-learn brings it

            share_S1 = torch.from_numpy(betaincinv(BETA, BETA, (1 - ramp_S1).numpy()))
            return torch.lerp(last_N, first_N, share_S1)


def unipc_levels(factor_N: Tensor, *, num_steps: int) -> Tensor:
    """Levels [S + 1, N] of UniPCMultistepScheduler(use_flow_sigmas, flow_shift=factor).

    They fall from 1 - `NEAR_ONE` to 0. The operations and their order are those of `set_timesteps`,
    numpy's `linspace` included, because the last bit of a level can change its rounded timestep.
    """
    ramp_S1 = torch.arange(num_steps, dtype=torch.float64)[:, None]
    t_SN = timestep_sampling.shifted(ramp_S1 * ((LAST_LEVEL - 1) / num_steps) + 1, factor_N)
    # Diffusers lowers a level of 1, because its half log-SNR would be infinite.
    t_SN[0] = torch.where((t_SN[0] - 1).abs() < NEAR_ONE, t_SN[0] - NEAR_ONE, t_SN[0])
    return torch.cat([t_SN, torch.zeros_like(t_SN[:1])])


def linear_quadratic_levels(num_steps: int) -> Tensor:
    """Levels [S + 1] from 1 to 0: half of the steps lead to 1 - `NEAR_NOISE`, the rest to 0.

    The first half is a line; the second is a parabola that continues the line with the same slope.
    Source: `linear_quadratic_schedule` of Diffusers' LTXConditionPipeline.
    """
    linear, step_S = num_steps // 2, torch.arange(num_steps + 1, dtype=torch.float64)
    if linear == 0:
        return 1 - step_S
    slope, rest_S = NEAR_NOISE / linear, (step_S - linear).clamp(min=0)
    left = num_steps - linear
    return 1 - slope * step_S - (1 - slope * num_steps) / left**2 * rest_S**2


@dataclass(frozen=True, slots=True)
class FlowMatching:
    """Flow matching, for training and sampling; its level is t, the fraction of noise."""

    config: FlowConfig
    karras: EdmConfig = field(default_factory=EdmConfig)
    """Source of sigma_min, sigma_max and rho, for samplers with the levels of Karras et al."""

    def shift(self, num_tokens: Sequence[int]) -> Tensor:
        """Factor by which the levels of each sample are shifted, [N], float64 on the CPU."""
        c = self.config
        if c.time_shift_type is not None:
            return timestep_sampling.shift_factors_of_mu(
                num_tokens,
                c.time_shift_type,
                base=(c.base_image_seq_len, c.base_shift),
                most=(c.max_image_seq_len, c.max_shift),
            )
        return timestep_sampling.shift_factors(
            num_tokens, shift=c.flow_shift, base_tokens=c.shift_base_tokens
        )

    def levels(self, quantile_N: Tensor, num_tokens: Sequence[int], /) -> Tensor:
        """Levels t [N] at `quantile_N` of the training density, inside `level_range` if it is set.

        Raises:
            ValueError: the density has almost no levels inside `level_range`.
        """
        q_N, factor_N = quantile_N.double(), self.shift(num_tokens)
        if self.config.level_range is None:
            return timestep_sampling.shifted(self._unshifted(q_N), factor_N).float()
        q_N = self._inside_range(q_N, factor_N)
        t_N = timestep_sampling.shifted(self._unshifted(q_N), factor_N)
        return t_N.clamp(*self.config.level_range).float()

    def _unshifted(self, quantile_N: Tensor) -> Tensor:
        """Noise levels [N] of the density before the shift, at `quantile_N`."""
        c = self.config
        match c.density:
            case LevelDensity.UNIFORM:
                return quantile_N
            case LevelDensity.LOGIT_NORMAL:
                return timestep_sampling.logit_normal(
                    quantile_N, mean=c.logit_mean, std=c.logit_std
                )
            case LevelDensity.MODE:
                return timestep_sampling.mode(quantile_N, scale=c.mode_scale)

    def _quantile(self, t_N: Tensor) -> Tensor:
        """Quantiles [N] of the levels `t_N` in the density before the shift."""
        c = self.config
        match c.density:
            case LevelDensity.UNIFORM:
                return t_N
            case LevelDensity.LOGIT_NORMAL:
                return timestep_sampling.logit_normal_quantile(
                    t_N, mean=c.logit_mean, std=c.logit_std
                )
            case LevelDensity.MODE:
                return timestep_sampling.mode_quantile(t_N, scale=c.mode_scale)

    def _inside_range(self, quantile_N: Tensor, factor_N: Tensor) -> Tensor:
        """Maps quantiles [N] among the levels inside `level_range` to quantiles [N] of all levels.

        Raises:
            ValueError: the density has almost no levels inside `level_range`.
        """
        assert self.config.level_range is not None
        ends = torch.tensor(self.config.level_range, dtype=torch.float64)
        # The shift by 1 / s undoes that by s.
        low_N, high_N = (
            self._quantile(timestep_sampling.shifted(end, 1 / factor_N).clamp(0, 1)) for end in ends
        )
        if bool((high_N - low_N < LEAST_MASS).any()):
            raise ValueError(
                f"objective.level_range={list(self.config.level_range)} holds less than one in a"
                f" billion of the levels that objective.density={self.config.density} draws with a"
                f" shift of {float(factor_N[(high_N - low_N).argmin()]):g}; set a wider range,"
                " another density, or another objective.flow_shift"
            )
        return torch.lerp(low_N, high_N, quantile_N)

    def problem_at(self, batch: TokenStream, noise_N: Tensor, noise_TC: Tensor) -> Problem:
        t_N, latent_TC, noise_TC = noise_N.float(), batch.latent_TC.float(), noise_TC.float()
        state_TC = torch.lerp(latent_TC, noise_TC, per_token(t_N, batch))
        target_TC = latent_TC if self._says_latent else noise_TC - latent_TC
        return Problem(
            input_TC=real_only(state_TC, batch),
            level_M=self.config.timestep_scale * t_N,
            target_TC=real_only(target_TC, batch),
            weight_N=self.weight(t_N),
            # An error e of the latent is an error -e / t of the velocity (state - latent) / t.
            scale_N=1 / t_N.clamp(min=NEAR_CLEAN) if self._says_latent else None,
            noise_N=t_N,
        )

    def weight(self, t_N: Tensor) -> Tensor:
        """Weight of the loss [N] at the levels `t_N`, by `objective.weighting`."""
        match self.config.weighting:
            case Weighting.NONE:
                return torch.ones_like(t_N)
            case Weighting.LINEAR:
                return 1 + self.config.flow_shift * t_N

    @property
    def _says_latent(self) -> bool:
        return self.config.prediction is FlowPrediction.X

    def schedule(self, num_tokens: Sequence[int], *, num_steps: int) -> Tensor:
        if (steps := self.config.sampling_timesteps) is not None:
            level_S = torch.tensor((*steps, 0), dtype=torch.float64) / self.config.timestep_scale
            return level_S[:, None].expand(-1, len(num_tokens))
        if self.config.steps_evenly:
            factor_N = self.sampling_shift(num_tokens, num_steps)
            last_N = self._last_even_step(factor_N, num_steps)
            how = {"terminal": self.config.shift_terminal, "spacing": self.config.level_spacing}
            return even_levels(factor_N, last_N, num_steps=num_steps, **how)
        if self._is_unipc:
            return unipc_levels(self.shift(num_tokens), num_steps=num_steps)
        if self.config.sampling_levels is SamplingLevels.LINEAR_QUADRATIC:
            return linear_quadratic_levels(num_steps)[:, None].expand(-1, len(num_tokens))
        if self.config.sampling_levels is SamplingLevels.QUANTILES:
            return self._quantile_levels(self.shift(num_tokens), num_steps)
        c = self.karras
        sigma_S = karras_levels(num_steps, sigma_min=c.sigma_min, sigma_max=c.sigma_max, rho=c.rho)
        if self._keeps_last_noise:
            sigma_S[-1] = sigma_S[-2]
        return (sigma_S / (1 + sigma_S))[:, None].expand(-1, len(num_tokens))

    def _quantile_levels(self, factor_N: Tensor, num_steps: int) -> Tensor:
        """Levels [S + 1, N] at evenly spaced quantiles of the training density, falling to 0.

        Source: `_logit_normal_sigmas` of Diffusers' Ideogram4Pipeline.
        """
        quantile_S1 = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)[:-1, None]
        low, high = torch.tensor(LOGITS, dtype=torch.float64).sigmoid()
        t_SN = timestep_sampling.shifted(self._unshifted(quantile_S1), factor_N).clamp(low, high)
        # Rounded to float32 as in that pipeline, because the last bit can change the prediction.
        t_SN = t_SN.float().to(t_SN)
        return torch.cat([t_SN, torch.zeros_like(t_SN[:1])])

    def sampling_shift(self, num_tokens: Sequence[int], num_steps: int) -> Tensor:
        """Factor [N], float64, by which the even levels of each sample's sampler are shifted."""
        if self.config.sampling_levels is SamplingLevels.EMPIRICAL:
            return timestep_sampling.empirical_shift_factors(num_tokens, num_steps=num_steps)
        return self.shift(num_tokens)

    def _last_even_step(self, factor_N: Tensor, num_steps: int) -> Tensor:
        """Level [N] of the last evenly spaced step above 0, before the levels are shifted."""
        c = self.config
        last = 1 / num_steps if c.ends_at_one_step else LAST_LEVEL
        last_N = torch.full_like(factor_N, last)
        if c.ends_at_one_step or c.time_shift_type is not None:
            return last_N
        # Diffusers shifts this level twice if the shift is constant, because its `sigma_min` is
        # already shifted. We do the same, so that an exported model generates the same pictures.
        return timestep_sampling.shifted(last_N, factor_N)

    @property
    def _is_unipc(self) -> bool:
        return self.config.sampling_levels is SamplingLevels.UNIPC

    @property
    def _keeps_last_noise(self) -> bool:
        return self.config.sampling_levels is SamplingLevels.KARRAS_TO_SIGMA_MIN

    def start(self, noise_TC: Tensor) -> Tensor:
        if not self._keeps_last_noise:
            return noise_TC
        return self.karras.sigma_max / (1 + self.karras.sigma_max) * noise_TC

    def network_input(self, state_TC: Tensor, _noise_T1: Tensor, /) -> Tensor:
        return state_TC

    def network_level(self, noise_N: Tensor) -> Tensor:
        """Timestep [N] that the network embeds for the levels `noise_N`, as in training.

        With `sampling_levels=unipc` it is rounded down.
        """
        told_N = self.config.timestep_scale * noise_N
        return told_N.floor() if self._is_unipc else told_N

    def predict(self, state_TC: Tensor, raw_TC: Tensor, noise_T1: Tensor) -> Prediction:
        if self._says_latent:
            return Prediction(latent_TC=raw_TC, velocity_TC=(state_TC - raw_TC) / noise_T1)
        return Prediction(latent_TC=state_TC - noise_T1 * raw_TC, velocity_TC=raw_TC)

    def signal(self, noise_N: Tensor) -> Tensor:
        # UniPC keeps levels in float32, where 1 - 0.999999 is larger by 1.3%.
        return 1 - (noise_N.float().to(noise_N) if self._is_unipc else noise_N)

    def finish(self, state_TC: Tensor) -> Tensor:
        # The state of Cosmos-Predict2's loop is latent + sigma * noise, also at the end.
        return state_TC * (1 + self.karras.sigma_min) if self._keeps_last_noise else state_TC
