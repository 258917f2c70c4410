"""The regression problem of a pack, in training and in validation.

1. training_problem     the draws of `pack_draws`, then the problem at drawn levels
2. validation_problem   a pack at one quantile of levels, with the same noise at every validation
3. problem_of           the problem with each sample at a level; clean tokens have no noise
4. problem_of_streams   the problem of all streams of a pack, with given levels and noise of each
5. problem_of_velocity  the problem of flow matching with a given state and velocity
"""

# C patch features, T packed tokens, R real ones among them, N samples, L text tokens, E text width

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dit.batch import (
    LATENTS,
    SOUND,
    CleanTokens,
    FixedLevels,
    LatentVariance,
    NullInputs,
    PackedBatch,
    Problem,
    TokenStream,
    pack_identity,
)
from dit.config import ObjectiveConfig
from dit.config.choices import SoundLevels, ValidationLatents
from dit.config.sparsity import TokenRoute
from dit.objectives.noise import draw_latents, draw_noise
from dit.objectives.objective import TrainingObjective, per_token
from dit.objectives.pack_draws import (
    CPU,
    TRAINING_DRAWS,
    Draw,
    DrawContext,
    draw_dropout,
    draw_given_frames,
    of_samples,
    pack_rng,
    samples_drawn,
    with_null_inputs,
)
from dit.objectives.timestep_sampling import draw_quantiles
from dit.pack_wire import to_device


def training_problem(
    objective: TrainingObjective,
    batch: PackedBatch,
    *,
    seed: int,
    step: int,
    null: NullInputs,
    options: ObjectiveConfig,
    route: TokenRoute | None = None,
) -> tuple[PackedBatch, Problem]:
    """The pack of a training step after all of `TRAINING_DRAWS`, and its regression problem.

    All random numbers follow from (seed, step, batch.pack_id). Noise, and latents of shards that
    store distributions, are drawn on the device of the batch; all other numbers are drawn on the
    CPU, so they are equal on every device.
    """
    told: Any = {"null": null, "options": options, "route": route}
    batch, context = drawn_pack(batch, seed=seed, step=step, **told)
    where = batch.latent_TC.device
    quantile_N = draw_quantiles(samples_drawn(batch), context.rng(Draw.LEVELS))
    quantile_N = quantile_N.repeat_interleave(batch.copies)
    of_sound = quantile_N
    if batch.others and options.sound_levels is SoundLevels.OWN:
        of_sound = draw_quantiles(batch.num_samples, context.rng(Draw.SOUND_LEVELS))
    quantiles = {LATENTS: quantile_N, SOUND: of_sound}
    rngs = {LATENTS: context.rng(Draw.NOISE, where), SOUND: context.rng(Draw.SOUND_NOISE, where)}
    return batch, _problem_of_quantiles(objective, batch, quantiles, rngs)


def drawn_pack(
    batch: PackedBatch,
    *,
    seed: int,
    step: int,
    null: NullInputs,
    options: ObjectiveConfig,
    route: TokenRoute | None = None,
) -> tuple[PackedBatch, DrawContext]:
    """The pack of a step after all of `TRAINING_DRAWS`, and the context of the step's draws."""
    told: Any = {"null": null, "options": options, "route": route}
    context = DrawContext(seed=seed, step=step, pack_id=batch.pack_id, **told)
    for draw in TRAINING_DRAWS:
        batch = draw(batch, context)
    return batch, context


def validation_pack(
    batch: PackedBatch,
    *,
    seed: int,
    options: ObjectiveConfig,
    latents: ValidationLatents = ValidationLatents.MEAN,
    null: NullInputs | None = None,
    text_dropout: float = 0.0,
) -> PackedBatch:
    """A copy of a validation pack after its draws: latents, given frames, dropped captions.

    All draws are the same at every validation. `latents` says whether latents are the means of
    their distributions or drawn from them; a drawn latent does not depend on the other samples of
    the pack. Captions are dropped at the rate `text_dropout`, and replaced by `null`, which is
    needed only then.
    """
    if latents is ValidationLatents.MEAN:
        batch = batch.without(LatentVariance)
    else:
        where = batch.latent_TC.device
        told = {"seed": seed, "step": 0, "device": where, "draw": Draw.VALIDATION_LATENTS}
        batch = draw_latents(
            batch, *(pack_rng(pack_id=pack_identity((key,)), **told) for key in batch.keys)
        )

    def rng(draw: Draw) -> torch.Generator:
        return pack_rng(seed=seed, step=0, pack_id=batch.pack_id, device=CPU, draw=draw)

    batch = draw_given_frames(batch, options, rng(Draw.VALIDATION_GIVEN_FRAMES))
    if not text_dropout:
        return batch
    assert null is not None
    dropped = draw_dropout(samples_drawn(batch), text_dropout, rng(Draw.VALIDATION_TEXT_DROPOUT))
    return with_null_inputs(batch, of_samples(batch, dropped), null)


def validation_problem(
    objective: TrainingObjective, batch: PackedBatch, *, seed: int, quantile: float
) -> Problem:
    """The problem of a validation pack, with all samples at one quantile of the training levels.

    The noise is the same at every step and quantile, and is never that of training.
    """
    quantile_N = torch.full((batch.num_samples,), quantile, dtype=torch.float64)
    rngs = {
        LATENTS: _validation_rng(batch, seed),
        SOUND: _validation_rng(batch, seed, Draw.VALIDATION_SOUND_NOISE),
    }
    return _problem_of_quantiles(objective, batch, dict.fromkeys(rngs, quantile_N), rngs)


def fixed_level_problem(
    objective: TrainingObjective, batch: PackedBatch, *, seed: int, levels: int
) -> Problem:
    """The problem of a validation pack, with each sample at its own noise level k / `levels`.

    The pack's `FixedLevels` holds k for each sample. The noise is that of `validation_problem`.
    """
    fixed = batch.method(FixedLevels)
    assert fixed is not None and not batch.others, "fixed levels are of one stream"
    noise_N = torch.tensor(fixed.indices, dtype=torch.float64) / levels
    noise_TC = draw_noise(batch, _validation_rng(batch, seed))
    return _problem_at(objective, batch, noise_N.float(), noise_TC)


def _validation_rng(
    batch: PackedBatch, seed: int, draw: Draw = Draw.VALIDATION_NOISE
) -> torch.Generator:
    where = batch.latent_TC.device
    return pack_rng(seed=seed, step=0, pack_id=batch.pack_id, device=where, draw=draw)


def _problem_of_quantiles(
    objective: TrainingObjective,
    batch: PackedBatch,
    quantiles: Mapping[str, Tensor],
    rngs: Mapping[str, torch.Generator],
) -> Problem:
    """The problem of `batch` with all its streams, at drawn levels and with drawn noise.

    `quantiles` maps each stream's name to the quantiles [N] of its levels, `rngs` to the generator
    of its noise. If levels are shifted by the number of tokens, a stream's own tokens count.
    """
    levels, noise = dict[str, Tensor](), dict[str, Tensor]()
    for name, stream in batch.streams.items():
        # A sample may have no tokens in this stream. Nothing reads its level, but a shift by 0
        # tokens would fail.
        tokens = [max(tokens, 1) for tokens in stream.latent_tokens]
        levels[name] = objective.levels(quantiles[name], tokens)
        noise[name] = draw_noise(stream, rngs[name])
    return problem_of_streams(objective, batch, levels, noise)


def draw_problem(
    objective: TrainingObjective,
    batch: PackedBatch,
    *,
    levels_rng: torch.Generator,
    noise_rng: torch.Generator,
) -> Problem:
    """The problem of `batch` at random levels, one for each sample or preference pair.

    `levels_rng` is on the CPU, `noise_rng` on the device of the batch.
    """
    quantile_N = draw_quantiles(samples_drawn(batch), levels_rng)
    quantile_N = quantile_N.repeat_interleave(batch.copies)
    return problem_of(objective, batch, quantile_N, noise_rng=noise_rng)


def problem_of(
    objective: TrainingObjective,
    batch: PackedBatch,
    quantile_N: Tensor,
    *,
    noise_rng: torch.Generator,
) -> Problem:
    """The regression problem of `batch`; `quantile_N` has the quantile of each sample's level."""
    assert not batch.others, "a run draws levels and noise of the main stream alone"
    noise_N = objective.levels(quantile_N, batch.latent_tokens)
    return _problem_at(objective, batch, noise_N, draw_noise(batch, noise_rng))


def problem_of_streams(
    objective: TrainingObjective,
    batch: PackedBatch,
    noise_N: Mapping[str, Tensor],
    noise_TC: Mapping[str, Tensor],
) -> Problem:
    """The problem of all streams of `batch`.

    `noise_N` and `noise_TC` map each stream's name to its levels [N] and its noise [T, C].
    """
    made = {
        name: _problem_at(objective, stream, noise_N[name], noise_TC[name])
        for name, stream in batch.streams.items()
    }
    return replace(made.pop(LATENTS), others=made)


def problem_of_velocity(
    objective: TrainingObjective,
    batch: PackedBatch,
    noise_N: Tensor,
    *,
    state_TC: Tensor,
    velocity_TC: Tensor,
) -> Problem:
    """The flow-matching problem at the state `state_TC` with the target `velocity_TC`, both [T, C].

    `noise_N` [N] has the level t of each sample. The problem's latent and noise are the ends (t = 0
    and t = 1) of the line through `state_TC` in the direction `velocity_TC`.
    """
    noise_T1 = per_token(noise_N, batch)
    latent_TC = state_TC - noise_T1 * velocity_TC
    latent_TC = latent_TC.where(batch.is_target_T[:, None], batch.latent_TC.to(latent_TC))
    noise_TC = state_TC + (1 - noise_T1) * velocity_TC
    there = replace(batch, latent_TC=latent_TC.float())
    return _problem_at(objective, there, noise_N.float(), noise_TC)


def _problem_at(
    objective: TrainingObjective, batch: TokenStream, noise_N: Tensor, noise_TC: Tensor
) -> Problem:
    noise_N = to_device(noise_N, batch.latent_TC.device)
    problem = objective.problem_at(batch, noise_N, noise_TC)
    problem = replace(problem, level_M=with_clean_level(problem.level_M, batch, objective))
    if not batch.has_given_tokens:
        return problem
    given_T1 = ~batch.is_target_T[:, None]
    return replace(
        problem,
        input_TC=with_given_tokens(problem.input_TC, batch),
        target_TC=problem.target_TC.masked_fill(given_T1, 0),
    )


def with_given_tokens(input_TC: Tensor, batch: TokenStream) -> Tensor:
    """`input_TC` with the noise-free latents of `batch` at clean tokens and reference tokens."""
    return torch.where(batch.is_target_T[:, None], input_TC, batch.latent_TC.to(input_TC))


class _TellsLevels(Protocol):
    """Interface that `TrainingObjective` and `SamplingPath` share: the network's timesteps."""

    def network_level(self, noise_N: Tensor) -> Tensor: ...


def with_clean_level(level_N: Tensor, batch: TokenStream, objective: _TellsLevels) -> Tensor:
    """Timesteps [M] of a pack: those of its samples, `level_N` [N], then those of clean tokens.

    M = 2 N: each sample has a timestep for its clean tokens. If the pack has no `CleanTokens`, M =
    N.
    """
    clean = batch.method(CleanTokens)
    if clean is None:
        return level_N
    told = clean_network_level(objective, clean.level)
    return torch.cat((level_N, torch.full_like(level_N, told)))


def clean_network_level(objective: _TellsLevels, level: float) -> float:
    """The timestep that the network embeds for clean tokens, whose noise level is `level`.

    Raises:
        ValueError: the objective has no finite timestep for it, such as ln 0 in EDM.
    """
    told = float(objective.network_level(torch.tensor(level, dtype=torch.float64)))
    if not math.isfinite(told):
        raise ValueError(
            f"the objective gives tokens without noise (level {level}) the timestep {told}, which"
            " no network can embed; use objective.name=flow, or a family without such tokens"
        )
    return told
