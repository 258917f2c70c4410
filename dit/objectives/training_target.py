"""The regression problem of a pack: its random draws, as training and validation make them.

The frames at the beginning of a target that are given are those that its shard says, or drawn for
each sample. A given frame has no noise and no loss. What is drawn are counts, on the CPU; the pack
that was read holds the latents of all frames, so that nothing but its masks changes. Where the
frame is shown in channels beside the noisy ones (HunyuanVideo 1.5), a sample that does not use it
has zeros there.
"""

# C patch features, T packed tokens, R real ones among them, N samples, L text tokens, E text width

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dit.batch import TEXT, NullInputs, PackedBatch, Problem
from dit.config import ObjectiveConfig
from dit.config.sparsity import TokenRoute
from dit.objectives.objective import TrainingObjective
from dit.objectives.timestep_sampling import draw_quantiles
from dit.objectives.token_draws import draw_parts, draw_route
from dit.pack_wire import to_device


def draw_dropout(count: int, probability: float, rng: torch.Generator) -> list[bool]:
    """Which of `count` samples train without an input of theirs; `rng` is a CPU generator."""
    return (torch.rand(count, generator=rng, dtype=torch.float64) < probability).tolist()


def _drawn(batch: PackedBatch) -> int:
    """How many samples have draws of their own; the two of a pair share them."""
    return batch.num_samples // batch.copies


def _of_samples(batch: PackedBatch, drawn: Sequence[Any]) -> list[Any]:
    """What was drawn, for each sample."""
    return [one for one in drawn for _ in range(batch.copies)]


def with_null_inputs(batch: PackedBatch, dropped: Sequence[bool], null: NullInputs) -> PackedBatch:
    """The same pack, the inputs of the dropped samples replaced by those of an empty caption.

    The main text of a sample is replaced by its own rows for this purpose, where it has any.
    Lengths are Python integers, so this does not wait for the device.

    Raises:
        ValueError: an input of `null` has another width than those of the pack.
    """
    for name, value in null.items():
        packed = batch.vectors[name] if name in batch.vectors else batch.texts[name]
        if value.shape[-1] != packed.shape[-1]:
            raise ValueError(
                f"the null input `{name}` has shape {list(value.shape)}, in a pack of width"
                f" {packed.shape[-1]}; take it from the encoder that packed the dataset"
            )
    for name in [name for name in batch.texts if name in null]:
        rows_LE = batch.texts[name]
        each = [rows_LE[a:b] for a, b in pairwise(batch.text_offsets[name])]
        own = own_null_texts(batch) if name == TEXT else [rows_LE[:0]] * len(each)
        for n, (drop, own_LE) in enumerate(zip(dropped, own, strict=True)):
            if drop:
                each[n] = (own_LE if len(own_LE) else null[name]).to(rows_LE)
        offsets = tuple(accumulate(map(len, each), initial=0))
        batch = batch.with_text(name, torch.cat(each), offsets)
    vectors = dict(batch.vectors)
    for name in [name for name in vectors if name in null]:
        pairs = zip(dropped, vectors[name], strict=True)
        each = [null[name].to(own_E) if drop else own_E for drop, own_E in pairs]
        vectors[name] = torch.stack(each)
    return replace(batch, vectors=vectors, null_text_LE=None, null_text_starts=())


def own_null_texts(batch: PackedBatch) -> list[Tensor]:
    """What stands for the main text of each sample, [M, E]; 0 rows of one that has none."""
    rows_LE = batch.null_text_LE
    if rows_LE is None:
        return [batch.text_LE[:0]] * batch.num_samples
    return [rows_LE[a:b] for a, b in pairwise(batch.null_text_starts)]


def without_image(batch: PackedBatch, dropped: Sequence[bool], null: NullInputs) -> PackedBatch:
    """The same pack with zeros for what is made of the pictures of the dropped samples.

    Those are the condition channels, and the texts and vectors that no caption decides: `null` has
    no value for them. Numbers of rows stay, but where a network may be given no picture: there the
    sample has no rows of it. Given frames are left to `draw_given_frames`.
    """
    if not any(dropped):
        return batch
    if batch.pictures:
        return without_pictures(batch, dropped)
    changes: dict[str, Tensor] = {}
    if batch.condition_TC is not None:
        dropped_N = to_device(torch.tensor(dropped), batch.segment_T.device)
        is_dropped_T1 = dropped_N[batch.segment_T, None]
        changes["condition_TC"] = batch.condition_TC.masked_fill(is_dropped_T1, 0)
    offsets = {name: of for name, of in batch.text_offsets.items() if name not in null}
    rows = {name: range(batch.num_samples + 1) for name in batch.vectors if name not in null}
    for field, every in (("texts", offsets), ("vectors", rows)):
        for name, starts in every.items():
            rows_LE = getattr(batch, field)[name].clone()
            for drop, (first, stop) in zip(dropped, pairwise(starts), strict=True):
                if drop:
                    rows_LE[first:stop] = 0
            changes[f"{field}.{name}"] = rows_LE
    return batch.with_tensors(changes)


CPU = torch.device("cpu")


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
    """The pack as it is trained on at a step, and its regression problem.

    It has null inputs in place of dropped captions, zeros in place of dropped images, the drawn
    numbers of given frames, with two levels a sample the parts that have them, and with a `route`
    the tokens that its layers see. All random numbers
    follow from (seed, step, batch.pack_id). All but noise are drawn on the CPU, so they are the
    same on every device; noise is drawn on the device of the batch.
    """

    def rng(draw: Draw, device: torch.device) -> torch.Generator:
        return pack_rng(seed=seed, step=step, pack_id=batch.pack_id, device=device, draw=draw)

    dropped = dropped_captions(batch, seed=seed, step=step, options=options)
    blind = draw_dropout(_drawn(batch), options.image_dropout, rng(Draw.IMAGE_DROPOUT, CPU))
    blind = _of_samples(batch, blind)
    batch = draw_given_frames(batch, options, rng(Draw.GIVEN_FRAMES, CPU))
    batch = with_null_inputs(without_image(batch, blind, null), dropped, null)
    if options.level_share is not None:
        batch = draw_parts(batch, options.level_share, rng(Draw.PARTS, CPU))
    problem = draw_problem(
        objective,
        batch,
        levels_rng=rng(Draw.LEVELS, CPU),
        noise_rng=rng(Draw.NOISE, batch.latent_TC.device),
    )
    if route is not None:
        batch = draw_route(batch, route, rng(Draw.ROUTE, CPU))
    drops = _stream(seed, step, batch.pack_id, Draw.ADAPTER_DROPOUT) >> 1
    return replace(batch, dropout_seed=drops), problem


def dropped_captions(
    batch: PackedBatch, *, seed: int, step: int, options: ObjectiveConfig
) -> list[bool]:
    """Which samples of the pack `training_problem` trains without their caption at a step."""
    rng = pack_rng(seed=seed, step=step, pack_id=batch.pack_id, device=CPU, draw=Draw.TEXT_DROPOUT)
    return _of_samples(batch, draw_dropout(_drawn(batch), options.text_dropout, rng))


def validation_pack(batch: PackedBatch, *, seed: int, options: ObjectiveConfig) -> PackedBatch:
    """The pack with drawn numbers of given frames: the same ones at every validation."""
    rng = pack_rng(
        seed=seed, step=0, pack_id=batch.pack_id, device=CPU, draw=Draw.VALIDATION_GIVEN_FRAMES
    )
    return draw_given_frames(batch, options, rng)


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
    quantile_N = draw_quantiles(_drawn(batch), levels_rng)
    quantile_N = quantile_N.repeat_interleave(batch.copies)
    return problem_of(objective, batch, quantile_N, noise_rng=noise_rng)


def problem_of(
    objective: TrainingObjective,
    batch: PackedBatch,
    quantile_N: Tensor,
    *,
    noise_rng: torch.Generator,
) -> Problem:
    """The problem with each sample at the level of its quantile, and noise for each real token."""
    noise_N = objective.levels(quantile_N, batch.latent_tokens)
    noise_N = to_device(noise_N, batch.latent_TC.device)
    problem = objective.problem_at(batch, noise_N, draw_noise(batch, noise_rng))
    problem = replace(problem, level_M=with_clean_level(problem.level_M, batch, objective))
    if not batch.has_given_tokens:
        return problem
    given_T1 = ~batch.is_target_T[:, None]
    return replace(
        problem,
        input_TC=with_given_tokens(problem.input_TC, batch),
        target_TC=problem.target_TC.masked_fill(given_T1, 0),
    )


def with_given_tokens(input_TC: Tensor, batch: PackedBatch) -> Tensor:
    """Network input with the latents themselves at clean and reference tokens."""
    return torch.where(batch.is_target_T[:, None], input_TC, batch.latent_TC.to(input_TC))


class _TellsLevels(Protocol):
    """Both sides of an objective."""

    def network_level(self, noise_N: Tensor) -> Tensor: ...


def with_clean_level(level_N: Tensor, batch: PackedBatch, objective: _TellsLevels) -> Tensor:
    """Level rows [M] from those of the samples: rows of the clean level follow where it is told."""
    if batch.clean_level is None:
        return level_N
    told = clean_network_level(objective, batch.clean_level)
    return torch.cat((level_N, torch.full_like(level_N, told)))


def clean_network_level(objective: _TellsLevels, level: float) -> float:
    """The number that tells a network of tokens without noise, whose noise level is `level`.

    Raises:
        ValueError: the objective has none, as ln 0 of EDM.
    """
    told = float(objective.network_level(torch.tensor(level, dtype=torch.float64)))
    if not math.isfinite(told):
        raise ValueError(
            f"the samples have tokens without noise (level {level}), of which the objective would"
            f" tell the network {told}; use objective.name=flow, or a family without such inputs"
        )
    return told


def draw_noise(batch: PackedBatch, rng: torch.Generator) -> Tensor:
    """Standard normal noise [T, C], float32, zero on padding; that of a pair is the same.

    Numbers are drawn for the real tokens in pack order, so padding does not change them.
    """
    shape = (batch.real_tokens // batch.copies, batch.latent_TC.shape[1])
    noise_RC = torch.randn(shape, generator=rng, device=rng.device)
    if batch.in_pairs:
        of_pairs = noise_RC.split(batch.num_tokens[::2])
        noise_RC = torch.cat([noise for one in of_pairs for noise in (one, one)])
    return insert_padding(noise_RC, batch)


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
    GIVEN_FRAMES = 4
    VALIDATION_GIVEN_FRAMES = 5
    IMAGE_DROPOUT = 6
    ADAPTER_DROPOUT = 7
    ROUTE = 8
    PARTS = 9


def pack_rng(
    *, seed: int, step: int, pack_id: int, device: torch.device, draw: Draw = Draw.NOISE
) -> torch.Generator:
    """Generator of one pack at one step: the same on every layout and rank.

    Torch's CPU generator keeps only the low 32 bits of a seed, so two of 2**32 streams may coincide
    there. On CUDA all 64 bits count.
    """
    return torch.Generator(device).manual_seed(_stream(seed, step, pack_id, draw))


def _stream(seed: int, step: int, pack_id: int, draw: Draw) -> int:
    """64 bits: the same children of (seed, step, pack_id) that SeedSequence.spawn would make."""
    sequence = np.random.SeedSequence((seed, step, pack_id), spawn_key=(int(draw),))
    return int(sequence.generate_state(1, np.uint64)[0])


def draw_given_frames(
    batch: PackedBatch, options: ObjectiveConfig, rng: torch.Generator
) -> PackedBatch:
    """The pack in which each sample trains with a drawn number of given frames.

    With `given_frames`, a sample gets that many of its own first frames, and at least one is left
    to learn, so that an image gets none. Else a sample keeps the given frames of its shard with
    `image_condition_probability`. `rng` is a CPU generator; one number is drawn for each sample.
    """
    if options.given_frames is None and options.image_condition_probability == 1:
        return batch
    uniform_N = torch.rand(_drawn(batch), generator=rng, dtype=torch.float64).tolist()
    uniform_N = _of_samples(batch, uniform_N)
    if options.given_frames is None and batch.pictures:
        unused = [one >= options.image_condition_probability for one in uniform_N]
        return without_pictures(batch, unused)
    if options.given_frames is None:
        of_shard = batch.clean_tokens or (0,) * batch.num_samples
        kept = [one < options.image_condition_probability for one in uniform_N]
        counts = [tokens * keep for tokens, keep in zip(of_shard, kept, strict=True)]
    else:
        edges = list(accumulate(options.given_frames))
        frames = [bisect(edges[:-1], one * edges[-1]) for one in uniform_N]
        pairs = zip(frames, batch.grids, strict=True)
        counts = [min(count, f - 1) * h * w for count, (f, h, w) in pairs]
    return with_clean_tokens(batch, counts)


def without_pictures(batch: PackedBatch, dropped: Sequence[bool]) -> PackedBatch:
    """The same pack, dropped samples of text alone: condition channels of zeros, and no rows."""
    if not any(dropped):
        return batch
    if batch.condition_TC is not None:
        dropped_N = to_device(torch.tensor(dropped), batch.segment_T.device)
        condition_TC = batch.condition_TC.masked_fill(dropped_N[batch.segment_T, None], 0)
        batch = replace(batch, condition_TC=condition_TC)
    for name in batch.pictures:
        rows_LE, spans = batch.texts[name], pairwise(batch.text_offsets[name])
        each = [rows_LE[a : a if drop else b] for drop, (a, b) in zip(dropped, spans, strict=True)]
        offsets = tuple(accumulate(map(len, each), initial=0))
        batch = batch.with_text(name, torch.cat(each), offsets)
    return batch


def with_clean_tokens(batch: PackedBatch, counts: Sequence[int]) -> PackedBatch:
    """The same pack with so many tokens given at the beginning of each target.

    `batch` is a whole pack. Nothing waits for the device.
    """
    assert batch.share.count == 1, "draws are made before a pack is split"
    assert batch.clean_level is not None or not any(counts), "given tokens have no level"
    numbers = torch.tensor([batch.starts[:-1], batch.latent_tokens, counts])
    numbers_T = to_device(numbers, batch.segment_T.device)[:, batch.segment_T]
    start_T, own_T, clean_T = numbers_T.unbind()
    row_T = torch.arange(len(start_T), device=start_T.device) - start_T
    is_own_T, is_clean_T = row_T < own_T, row_T < clean_T
    level_row_T = batch.segment_T + batch.num_samples * is_clean_T
    return replace(
        batch,
        is_target_T=is_own_T & ~is_clean_T,
        level_row_T=torch.where(is_own_T, level_row_T, batch.level_row_T),
        clean_tokens=tuple(counts) if any(counts) else (),
    )
