"""The regression problem of a pack: its random draws, as training and validation make them."""

# C patch features, T packed tokens, R real ones among them, N samples, L text tokens, E text width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from dit.batch import PackedBatch, Problem
from dit.objectives.objective import TrainingObjective
from dit.objectives.timestep_sampling import draw_quantiles


def draw_text_dropout(count: int, probability: float, rng: torch.Generator) -> list[bool]:
    """Whether each of `count` samples trains with the null text; `rng` is a CPU generator."""
    return (torch.rand(count, generator=rng, dtype=torch.float64) < probability).tolist()


def with_texts(batch: PackedBatch, texts: Sequence[Tensor]) -> PackedBatch:
    """The same pack with other captions: `texts` has one [L, E] for each sample.

    Raises:
        ValueError: a caption without tokens, of another width, or not one for each sample.
    """
    if len(texts) != batch.num_samples:
        raise ValueError(f"{len(texts)} captions for a pack of {batch.num_samples} samples")
    width = batch.text_LE.shape[1]
    for text_LE in texts:
        if text_LE.ndim != 2 or text_LE.shape[0] < 1 or text_LE.shape[1] != width:
            raise ValueError(
                f"text embedding of shape {tuple(text_LE.shape)} in a pack of text width {width}:"
                f" give [L, {width}] with L >= 1, from the text encoder that packed the dataset"
            )
    starts = tuple(accumulate((len(text_LE) for text_LE in texts), initial=0))
    text_LE = torch.cat([text_LE.to(batch.text_LE) for text_LE in texts])
    return replace(batch, text_LE=text_LE, text_starts=starts)


def with_null_text(
    batch: PackedBatch, dropped: Sequence[bool], null_text_LE: Tensor
) -> PackedBatch:
    """The same pack, the captions of the dropped samples replaced by the null text [L0, E].

    Lengths are Python integers, so this does not wait for the device.

    Raises:
        ValueError: the null text has no tokens or another width than the captions.
    """
    spans = zip(dropped, pairwise(batch.text_starts), strict=True)
    texts = [null_text_LE if drop else batch.text_LE[a:b] for drop, (a, b) in spans]
    return with_texts(batch, texts)


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


class Draw(IntEnum):
    """Purpose of a stream of random numbers; the streams of one pack are independent."""

    NOISE = 0
    LEVELS = 1
    TEXT_DROPOUT = 2
    VALIDATION_NOISE = 3


def pack_rng(
    *, seed: int, step: int, pack_id: int, device: torch.device, draw: Draw = Draw.NOISE
) -> torch.Generator:
    """Generator of one pack at one step: the same on every layout and rank.

    Torch's CPU generator keeps only the low 32 bits of a seed, so two of 2**32 streams may coincide
    there. On CUDA all 64 bits count.
    """
    # The same children of (seed, step, pack_id) that SeedSequence.spawn would make.
    sequence = np.random.SeedSequence((seed, step, pack_id), spawn_key=(int(draw),))
    return torch.Generator(device).manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
