"""Noisy packs that move from noise to latents, for distillation.

A `NoisyPack` moves from level to level by steps of Euler's method or of LCM, as in `dit.sampling`,
but each sample has its own level, and does not move in a step that ends where it begins.
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.objectives.objective import SamplingPath, per_token, real_only
from dit.objectives.timestep_sampling import draw_quantiles
from dit.objectives.training_target import with_clean_level, with_given_tokens
from dit.pack_wire import to_device

LEAST_DISTANCE = 1e-6
"""Smallest divisor of a gradient; the divisor is the mean distance between the latents of student
and teacher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyPack:
    """A pack with a noisy state and level for each sample."""

    batch: PackedBatch
    state_TC: Tensor  # float64, as in samplers
    level_N: Tensor  # float64, on the device

    @classmethod
    def of(
        cls,
        path: SamplingPath,
        batch: PackedBatch,
        latent_TC: Tensor,
        level_N: Tensor,
        noise_TC: Tensor,
    ) -> NoisyPack:
        """A pack with the states signal(level) * `latent_TC` + level * `noise_TC`.

        `level_N` has the level of each sample.
        """
        signal_T1, level_T1 = (per_token(one, batch) for one in (path.signal(level_N), level_N))
        state_TC = signal_T1 * latent_TC + level_T1 * noise_TC
        return cls(batch=batch, state_TC=state_TC, level_N=level_N)

    def asked(self, path: SamplingPath, batch: PackedBatch | None = None) -> Problem:
        """The network input at this state, as a `Problem`; its target and weights have no meaning.

        `batch`, if set, is used in place of the own pack: it has the same latents and other texts.
        """
        batch = self.batch if batch is None else batch
        noise_T1 = per_token(self.level_N, batch)
        input_TC = real_only(path.network_input(self.state_TC, noise_T1), batch).float()
        if batch.has_given_tokens:
            input_TC = with_given_tokens(input_TC, batch)
        level_N = path.network_level(self.level_N).float()
        return Problem(
            input_TC=input_TC,
            level_M=with_clean_level(level_N, batch, path),
            target_TC=input_TC,
            weight_N=level_N,
            noise_N=level_N,
        )

    def moved(self, path: SamplingPath, raw_TC: Tensor, end_N: Tensor) -> NoisyPack:
        """The pack after an Euler step to the levels `end_N`.

        `raw_TC` is the network's raw output for this pack.
        """
        noise_T1 = per_token(self.level_N, self.batch)
        velocity_TC = path.predict(self.state_TC, raw_TC.double(), noise_T1).velocity_TC
        step_T1 = per_token(end_N - self.level_N, self.batch)
        return replace(self, state_TC=self.state_TC + step_T1 * velocity_TC, level_N=end_N)

    def latent(self, path: SamplingPath, raw_TC: Tensor) -> Tensor:
        """The clean latent [T, C], float64, that the raw network output `raw_TC` predicts."""
        noise_T1 = per_token(self.level_N, self.batch)
        return path.predict(self.state_TC, raw_TC.double(), noise_T1).latent_TC

    def renoised(
        self, path: SamplingPath, raw_TC: Tensor, end_N: Tensor, noise_TC: Tensor
    ) -> NoisyPack:
        """The pack after a step of LCM to the levels `end_N`.

        Its states are the latents that `raw_TC` predicts, mixed with the new noise `noise_TC`. A
        sample whose level is already that of `end_N` keeps its state.
        """
        there = NoisyPack.of(path, self.batch, self.latent(path, raw_TC), end_N, noise_TC)
        stays_T1 = per_token(end_N == self.level_N, self.batch)
        return replace(there, state_TC=torch.where(stays_T1, self.state_TC, there.state_TC))


def mean_velocity(start: NoisyPack, end: NoisyPack) -> Tensor:
    """The velocity [T, C] with which one Euler step leads from `start` to `end`."""
    step_T1 = per_token(end.level_N - start.level_N, start.batch)
    return (end.state_TC - start.state_TC) / step_T1


def draw_steps(count: int, rng: torch.Generator, *, steps: int) -> Tensor:
    """Random indices [count] of steps, uniform in 0 to `steps` - 1; `rng` is a CPU generator."""
    return (draw_quantiles(count, rng) * steps).long()


def levels_of_steps(level_SN: Tensor, step_N: Tensor) -> Tensor:
    """Levels [N] at which step `step_N[n]` of each sample n begins, from `level_SN` [S + 1, N]."""
    return level_SN.gather(0, step_N[None])[0]


def regression_to(start: NoisyPack, path: SamplingPath, raw_TC: Tensor, move_TC: Tensor) -> Problem:
    """The regression problem that moves the latent predicted at `start` by `move_TC`.

    The network's raw output `raw_TC` predicts that latent; the target is the raw output that would
    predict the moved latent. The loss is half the squared distance of latents, so its gradient with
    respect to the predicted latent is -`move_TC` divided by the loss's divisor.
    """
    level_N1 = start.level_N[:, None]
    ones_N1, zeros_N1 = torch.ones_like(level_N1), torch.zeros_like(level_N1)
    # Predictions are affine in the raw output: this is the factor.
    of_one, of_none = (path.predict(zeros_N1, raw, level_N1) for raw in (ones_N1, zeros_N1))
    factor_N = (of_one.latent_TC - of_none.latent_TC)[:, 0]
    target_TC = raw_TC.double() + move_TC / per_token(factor_N, start.batch)
    asked = start.asked(path)
    unread_T1 = ~start.batch.is_target_T[:, None]
    return replace(
        asked,
        target_TC=target_TC.masked_fill(unread_T1, 0).float(),
        weight_N=(factor_N.square() / 2).float(),
        noise_N=start.level_N.float(),
    )


def distribution_gradient(
    batch: PackedBatch, latent_TC: Tensor, *, real_TC: Tensor, fake_TC: Tensor
) -> Tensor:
    """DMD's gradient [T, C] with respect to a student's latents `latent_TC`; 0 on clean tokens.

    It is (`fake_TC` - `real_TC`) / mean |`latent_TC` - `real_TC`|, with the mean over the target
    tokens and channels of a sample. `fake_TC` and `real_TC` are the latents that critic and teacher
    predict from the student's latent after noise is added: arXiv:2311.18828, Eq. 7 and 8 in terms
    of latents, where the mean cancels factors of the level.
    """
    target_T1 = batch.is_target_T[:, None]
    away_T = (latent_TC - real_TC).abs().mean(-1).masked_fill(~batch.is_target_T, 0)
    sums_N = away_T.new_zeros(batch.num_samples).index_add_(0, batch.segment_T, away_T)
    mean_N = sums_N / to_device(torch.tensor(batch.loss_tokens), sums_N.device)
    move_TC = (fake_TC - real_TC) / per_token(mean_N.clamp(min=LEAST_DISTANCE), batch)
    return move_TC.masked_fill(~target_T1, 0)
