"""Samplers: solvers of the ODE along a `SamplingPath`, from noise to latents.

1. Euler and Heun.
2. Multistep solvers (DPM-Solver++ and UniPC): second order with one network call in each step,
   because they reuse the previous prediction.
3. LCM, for distilled networks: no solver, but new noise at each level.

Both multistep solvers integrate the part of the ODE that is linear in the state exactly, over the
half log-SNR lambda = ln(signal / noise):

    state' = (s' / s) state + a' (1 - e^-h) latent,    h = lambda' - lambda

where a and s are the factors of latent and noise in the state, and ' marks the end of the step.
Flow matching begins at a = 0, where lambda is minus infinity. In that step h is infinite, e^-h is
0, and terms divided by h vanish, which is the correct limit.
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from dit.batch import PackedBatch, TokenStream
from dit.config import Sampler
from dit.models.family import KeptNorm
from dit.models.positions import patchify, unpatchify
from dit.objectives.noise import insert_padding
from dit.objectives.objective import Prediction, SamplingPath, per_token, real_only
from dit.pack_wire import to_device

Network = Callable[[Tensor, Tensor], Tensor]
"""The network as a function of (input_TC, level_N), both float32, that returns its raw output [T,
C]; text and positions are bound. `level_N` has a timestep for each sample."""
Predict = Callable[[Tensor, Tensor], Prediction]
"""The network's prediction as a function of (state_TC, level_N), where `level_N` has noise levels.
"""

TINY_NORM = 1e-12
"""Least value of a norm as a divisor, because the norm of padding is zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """Classifier-free guidance: its scale, the timesteps at which it acts, what it restores."""

    scale: float = 1.0
    """Guidance scale; 1: no guidance, with half the network calls."""
    between: tuple[float, float] | None = None
    """Lowest and highest timestep with guidance (arXiv:2404.07724); None: guidance at all
    timesteps."""
    of_references: float = 1.0
    """Scale i of guidance by references (`guided_by_references`)."""
    rescale: float = 0.0
    """phi of arXiv:2305.08891, Sec. 3.4: 1 restores the standard deviation of the conditional
    prediction."""
    keeps_norm: KeptNorm | None = None
    """Which vectors get back the norm that they have without guidance; None: none."""
    least_norm: float = 0.0
    """Least fraction of its norm that a guided vector keeps, if `keeps_norm`; 1: norms are not
    restored."""
    patch: tuple[int, int] = (1, 1)
    """Latent cells in a token: (frames, rows or columns)."""

    def at(self, level_N: Tensor) -> Tensor:
        """The guidance scale [N] of each sample at its timestep; 1 where guidance does not act."""
        return torch.where(self.acts(level_N), self.scale, torch.ones_like(level_N))

    def acts(self, level_N: Tensor) -> Tensor:
        """Whether guidance acts on each sample at its timestep, bool [N]."""
        if self.between is None:
            return torch.ones_like(level_N, dtype=torch.bool)
        low, high = self.between
        return (level_N >= low) & (level_N <= high)


@dataclass(frozen=True, slots=True)
class StepLevels:
    """Timesteps [S + 1, N] of a sampler: at the start of each step and at the end of the last."""

    level_SN: Tensor  # [S + 1, N]; the last row has the timesteps of the finished latents

    @classmethod
    def of(cls, path: SamplingPath, batch: PackedBatch, *, num_steps: int) -> StepLevels:
        noise_SN = path.schedule(batch.latent_tokens, num_steps=num_steps)
        return cls(path.network_level(noise_SN).float())

    @property
    def steps(self) -> int:
        return len(self.level_SN) - 1

    def number(self, level_N: Tensor) -> int:
        """Index of the step that begins at the timesteps `level_N`."""
        # The first sample decides for all. The nearest level, as devices may round differently.
        return int((self.level_SN[:-1, 0] - level_N[0].cpu()).abs().argmin())

    def end(self, level_N: Tensor) -> Tensor:
        """Timesteps [N] at the end of the step that begins at `level_N`."""
        return self.level_SN[self.number(level_N) + 1].to(level_N)


def initial_noise(batch: PackedBatch, seeds: Sequence[int]) -> Tensor:
    """Standard normal noise [T, C], float32, zero on padding.

    The noise of a sample depends on its seed and size only, not on the other samples of the pack
    nor on the device.

    Raises:
        ValueError: the number of seeds is not that of samples.
    """
    if len(seeds) != batch.num_samples:
        raise ValueError(
            f"a pack needs one seed for each sample, but got {len(seeds)} seeds for"
            f" {batch.num_samples} samples"
        )
    width = batch.latent_TC.shape[1]
    drawn = [
        torch.randn(tokens, width, generator=torch.Generator("cpu").manual_seed(seed))
        for tokens, seed in zip(batch.num_tokens, seeds, strict=True)
    ]
    return insert_padding(torch.cat(drawn).to(batch.latent_TC.device), batch)


def guided(
    conditional: Network, unconditional: Network, guidance: Guidance, batch: PackedBatch
) -> Network:
    """A network that combines two predictions by guidance: uncond + scale * (cond - uncond).

    If `guidance` says so, norms and standard deviations are then brought back to those of `cond`.
    The predictions are raw network outputs. At a given state, latent and velocity are affine in the
    raw output, so this equals guidance on either. `unconditional` is not called if no sample of the
    pack is guided.
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
        if guidance.keeps_norm is not None and guidance.least_norm < 1:
            mixed, own = (kept_norms(x_TC, guidance, batch) for x_TC in (mixed_TC, cond_TC))
            factor = (own / mixed.clamp_min(TINY_NORM)).clamp_min(guidance.least_norm)
            if guidance.keeps_norm is KeptNorm.TOKEN_AT_MOST:
                factor = factor.clamp_max(1)
            mixed_TC = mixed_TC * factor
        return rescaled(mixed_TC, cond_TC, scale_N, guidance, batch)

    return network


def rescaled(
    mixed_TC: Tensor, cond_TC: Tensor, scale_N: Tensor, guidance: Guidance, batch: PackedBatch
) -> Tensor:
    """The guided prediction `mixed_TC`, with standard deviations moved towards those of `cond_TC`.

    A sample's factor is 1 + rescale * (ratio of both deviations - 1), with `guidance.rescale`;
    samples whose scale in `scale_N` is 1 are unchanged.
    """
    if not guidance.rescale:
        return mixed_TC
    factor_N = deviations(cond_TC, batch) / deviations(mixed_TC, batch)
    factor_N = torch.where(scale_N == 1, 1.0, factor_N)
    return mixed_TC * per_token(1 + guidance.rescale * (factor_N - 1), batch)


def guided_at_first(
    first: Network, after: Network, *, num_steps: int, part: float, sampler: Sampler
) -> Network:
    """A network that calls `first` in the first steps of a sampler, and `after` in the others.

    `part` is the fraction of steps that call `first`. The network counts its calls, so it serves a
    single run of the sampler. It cannot tell steps by their levels, because Heun's second call in a
    step has the level of the next step's first call.
    """
    guided_steps = sum((i + 1) / num_steps <= part for i in range(num_steps))
    calls, guided_calls = count(), guided_steps * sampler.calls_a_step

    def network(input_TC: Tensor, level_N: Tensor) -> Tensor:
        return (first if next(calls) < guided_calls else after)(input_TC, level_N)

    return network


def kept_norms(values_TC: Tensor, guidance: Guidance, batch: PackedBatch) -> Tensor:
    """The norms that guidance restores: of tokens, [T, 1], or of rows of the picture, [T, C]."""
    if guidance.keeps_norm is not KeptNorm.PICTURE_ROW:
        return values_TC.norm(dim=-1, keepdim=True)
    norm_TC = torch.ones_like(values_TC)
    for grid, start in zip(batch.grids, batch.starts, strict=False):
        latent_CFHW = unpatchify(values_TC[start:], grid, *guidance.patch)
        norm_CFH1 = latent_CFHW.norm(dim=-1, keepdim=True)
        _, rows_TC = patchify(norm_CFH1.expand_as(latent_CFHW), *guidance.patch)
        norm_TC[start : start + len(rows_TC)] = rows_TC
    return norm_TC


def deviations(values_TC: Tensor, batch: TokenStream) -> Tensor:
    """Standard deviation [N] of each sample's latent, over all its tokens and features, float32.

    Frames and pictures that condition a sample are included, as in Diffusers' pipelines, but not
    references.
    """
    counts = torch.tensor([batch.starts[:-1], batch.latent_tokens])
    start_T, own_T = to_device(counts, values_TC.device)[:, batch.segment_T]
    row_T = torch.arange(len(start_T), device=start_T.device) - start_T
    other_T1 = ~((row_T < own_T) | batch.is_target_T)[:, None]
    values_TC = values_TC.double()

    def sums(numbers_TC: Tensor) -> Tensor:
        chosen_TC = numbers_TC.masked_fill(other_T1, 0)
        zero_N = chosen_TC.new_zeros(batch.num_samples)
        return zero_N.index_add(0, batch.segment_T, chosen_TC.sum(-1))

    count_N = sums(torch.ones_like(values_TC))
    mean_N = sums(values_TC) / count_N
    centred_TC = values_TC - per_token(mean_N, batch)
    return (sums(centred_TC.square()) / (count_N - 1)).sqrt().float()


@torch.no_grad()
def sample(  # noqa: PLR0913  # each has a default but what a step cannot do without
    path: SamplingPath,
    network: Network,
    noise_TC: Tensor,
    batch: PackedBatch,
    *,
    num_steps: int,
    sampler: Sampler = Sampler.HEUN,
    each_step: Callable[[Tensor], None] | None = None,
    step_noise: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """Latents [T, C], whitened, float32, zero on padding, from standard normal `noise_TC`.

    `batch` gives the geometry; its latents are not read. `each_step` is called once a step, with
    the clean latents [T, C] that the network predicts at its start. `step_noise` returns standard
    normal noise [T, C] for the end of a step, by its index from 0; LCM needs it. The last step, to
    level 0, is of first order, because the network is not defined at level 0.

    Raises:
        ValueError: there are no steps.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1")
    level_SN = path.schedule(batch.latent_tokens, num_steps=num_steps).to(noise_TC.device)
    calls = count()

    def predict(state_TC: Tensor, noise_N: Tensor) -> Prediction:
        noise_T1 = per_token(noise_N, batch)
        input_TC = real_only(path.network_input(state_TC, noise_T1), batch).float()
        raw_TC = network(input_TC, path.network_level(noise_N).float())
        prediction = path.predict(state_TC, raw_TC.double(), noise_T1)
        if each_step is not None and next(calls) % sampler.calls_a_step == 0:
            each_step(real_only(prediction.latent_TC, batch).float())
        return prediction

    # float64 as in the sampler of the EDM paper. It costs nothing beside the network, and float32
    # rounding of a state of size sigma_max = 80 would be visible in the last steps, of size 0.002.
    state_TC = path.start(noise_TC.double())
    if sampler in (Sampler.EULER, Sampler.HEUN):
        state_TC = euler_or_heun(predict, state_TC, level_SN, batch, heun=sampler is Sampler.HEUN)
    elif sampler is Sampler.LCM:
        assert step_noise is not None, "each step of LCM needs noise"
        levels = LevelSchedule(level_SN, path.signal(level_SN), batch)
        state_TC = consistency(predict, state_TC, levels, step_noise)
    else:
        levels = LevelSchedule(level_SN, path.signal(level_SN), batch)
        solve = {Sampler.DPMPP: dpm_solver, Sampler.UNIPC: unipc}[sampler]
        state_TC = solve(predict, state_TC, levels)
    return real_only(path.finish(state_TC), batch).float()


def euler_or_heun(
    predict: Predict, state_TC: Tensor, level_SN: Tensor, batch: PackedBatch, *, heun: bool
) -> Tensor:
    """The state at the last level, after Euler or Heun steps along the velocity.

    Euler's method uses the velocity at the start of a step, Heun's the mean of both ends.
    """
    steps = len(level_SN) - 1
    for i in range(steps):
        step_T1 = per_token(level_SN[i + 1] - level_SN[i], batch)
        velocity_TC = predict(state_TC, level_SN[i]).velocity_TC
        if heun and i + 1 < steps:
            ahead_TC = predict(state_TC + step_T1 * velocity_TC, level_SN[i + 1]).velocity_TC
            velocity_TC = (velocity_TC + ahead_TC) / 2
        state_TC = state_TC + step_T1 * velocity_TC
    return state_TC


@dataclass(frozen=True, slots=True)
class LevelSchedule:
    """The noise levels that a solver visits, and the factors of latent and noise at each."""

    noise_SN: Tensor  # float64, falling to 0
    signal_SN: Tensor
    batch: PackedBatch

    @property
    def steps(self) -> int:
        return len(self.noise_SN) - 1

    def log_snr_step(self, i: int) -> Tensor:
        """The growth h = lambda' - lambda of the half log-SNR in step i, [N]."""
        lambda_2N = self.signal_SN[i : i + 2].log() - self.noise_SN[i : i + 2].log()
        return lambda_2N[1] - lambda_2N[0]

    def per_token(self, value_N: Tensor) -> Tensor:
        return per_token(value_N, self.batch)

    def step(self, i: int, state_TC: Tensor, latent_TC: Tensor) -> Tensor:
        """The state after step i if the predicted latent is constant during the step."""
        ratio_N = self.noise_SN[i + 1] / self.noise_SN[i]
        return self.per_token(ratio_N) * state_TC + self.latent_factor(i) * latent_TC

    def latent_factor(self, i: int) -> Tensor:
        """The factor a' (1 - e^-h) of the latent in step i, [T, 1] (formula of this file)."""
        return self.per_token(-self.signal_SN[i + 1] * torch.expm1(-self.log_snr_step(i)))


def consistency(
    predict: Predict, state_TC: Tensor, levels: LevelSchedule, step_noise: Callable[[int], Tensor]
) -> Tensor:
    """Latents of multistep consistency sampling (arXiv:2310.04378, Sec. 4.1).

    Each step adds new noise of the next level to the predicted latents; the last level has no
    noise. It equals `FlowMatchLCMScheduler` of Diffusers.
    """
    for i in range(levels.steps):
        latent_TC = predict(state_TC, levels.noise_SN[i]).latent_TC
        signal_T1 = levels.per_token(levels.signal_SN[i + 1])
        state_TC = signal_T1 * latent_TC
        if i + 1 < levels.steps:
            noise_T1 = levels.per_token(levels.noise_SN[i + 1])
            state_TC = state_TC + noise_T1 * step_noise(i).to(state_TC)
    return state_TC


def dpm_solver(predict: Predict, state_TC: Tensor, levels: LevelSchedule) -> Tensor:
    """Latents of DPM-Solver++(2M) (arXiv:2211.01095, Algorithm 2); the last step is first order."""
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
    """Latents of UniPC-2 with B(h) = e^h - 1 (arXiv:2302.04867, Algorithms 5 and 7 for data)."""
    known: list[Tensor] = []  # predicted latents of the two newest steps
    start_TC = state_TC  # state at the start of the previous step
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
    """The paper's negative ratio r = -h(i - 1) / h(i), [N]."""
    return -levels.log_snr_step(i - 1) / levels.log_snr_step(i)


def _corrected(
    levels: LevelSchedule, i: int, start_TC: Tensor, known: list[Tensor], end_TC: Tensor
) -> Tensor:
    """The state after step i, corrected by the latent `end_TC` predicted at the end of the step.

    `start_TC` is the state at the start of step i. `known` are latents [T, C]: the one predicted at
    the start of step i - 1, if there is such a step, and the one at the start of step i.
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
