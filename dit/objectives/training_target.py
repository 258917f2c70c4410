"""The regression problem of a pack: its random draws, as training and validation make them."""

# C patch features, T packed tokens, R real ones among them, N samples, L text tokens, E text width

from __future__ import annotations

import torch
from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.objectives.objective import TrainingObjective
from dit.objectives.rng import Draw, pack_rng
from dit.objectives.text_dropout import draw_text_dropout, with_null_text
from dit.objectives.timestep_sampling import draw_quantiles

CPU = torch.device("cpu")


def training_problem(
    objective: TrainingObjective,
    batch: PackedBatch,
    *,
    seed: int,
    step: int,
    null_text_LE: Tensor,
    text_dropout: float,
) -> tuple[PackedBatch, Problem]:
    """The pack with null texts in place of dropped captions, and its regression problem at a step.

    All random numbers follow from (seed, step, batch.pack_id). Levels and dropout are drawn on the
    CPU, so they are the same on every device; noise is drawn on the device of the batch.
    """

    def rng(draw: Draw, device: torch.device) -> torch.Generator:
        return pack_rng(seed=seed, step=step, pack_id=batch.pack_id, device=device, draw=draw)

    dropped = draw_text_dropout(batch.num_samples, text_dropout, rng(Draw.TEXT_DROPOUT, CPU))
    problem = draw_problem(
        objective,
        batch,
        levels_rng=rng(Draw.LEVELS, CPU),
        noise_rng=rng(Draw.NOISE, batch.latent_TC.device),
    )
    return with_null_text(batch, dropped, null_text_LE), problem


def validation_problem(
    objective: TrainingObjective, batch: PackedBatch, *, seed: int, quantile: float
) -> Problem:
    """The problem of a validation pack, all samples at one quantile of the training levels.

    The noise is the same at every step and quantile, and is never that of training.
    """
    where = batch.latent_TC.device
    rng = pack_rng(
        seed=seed, step=0, pack_id=batch.pack_id, device=where, draw=Draw.VALIDATION_NOISE
    )
    quantile_N = torch.full((batch.num_samples,), quantile, dtype=torch.float64)
    return problem_of(objective, batch, quantile_N, noise_rng=rng)


def draw_problem(
    objective: TrainingObjective,
    batch: PackedBatch,
    *,
    levels_rng: torch.Generator,
    noise_rng: torch.Generator,
) -> Problem:
    """The problem at one random level for each sample.

    `levels_rng` is on the CPU, `noise_rng` on the device of the batch.
    """
    quantile_N = draw_quantiles(batch.num_samples, levels_rng)
    return problem_of(objective, batch, quantile_N, noise_rng=noise_rng)


def problem_of(
    objective: TrainingObjective,
    batch: PackedBatch,
    quantile_N: Tensor,
    *,
    noise_rng: torch.Generator,
) -> Problem:
    """The problem with each sample at the level of its quantile, and noise for each real token."""
    noise_N = objective.levels(quantile_N, batch.num_tokens)
    noise_N = noise_N.to(batch.latent_TC.device, non_blocking=True)
    return objective.problem_at(batch, noise_N, draw_noise(batch, noise_rng))


def draw_noise(batch: PackedBatch, rng: torch.Generator) -> Tensor:
    """Standard normal noise [T, C], float32, zero on padding.

    Numbers are drawn for the real tokens in pack order, so padding does not change them.
    """
    shape = (batch.real_tokens, batch.latent_TC.shape[1])
    return insert_padding(torch.randn(shape, generator=rng, device=rng.device), batch)


def insert_padding(values_RC: Tensor, batch: PackedBatch) -> Tensor:
    """Values of the real tokens in pack order -> [T, C] with zeros on padding."""
    # A cumulative count, because nonzero() would wait for the device. Before the first real token
    # it is -1, which is a valid row that is masked like all padding.
    row_T = batch.is_real_T.cumsum(0) - 1
    return values_RC[row_T].masked_fill(~batch.is_real_T[:, None], 0)
