"""Random draws for a pack in training: given frames, dropped inputs, subsets of tokens.

1. TRAINING_DRAWS  all draws in order; each has its own stream of random numbers (`Draw`)
2. frames          how many first frames of a target are given, from its shard or drawn
3. dropout         captions and images that a sample is trained without

A given frame has no noise and no loss. Only the number of given frames is drawn, on the CPU; the
pack holds the latents of all frames, so only its masks change. If a network sees the frame in extra
channels (HunyuanVideo 1.5), these channels are zero for a sample that does not use the frame.
"""

# T packed tokens, N samples, L text tokens, E text width

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dit.batch import (
    SOUND,
    TEXT,
    AdapterDropout,
    CleanTokens,
    NullInputs,
    NullTexts,
    PackedBatch,
    PictureTexts,
    TokenStream,
)
from dit.config import ObjectiveConfig
from dit.config.sparsity import TokenRoute
from dit.objectives.noise import draw_latents
from dit.objectives.token_draws import draw_parts, draw_route
from dit.pack_wire import to_device

CPU = torch.device("cpu")


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
    LATENTS = 10
    VALIDATION_LATENTS = 11
    VALIDATION_TEXT_DROPOUT = 12
    STUDENT_STEP = 13
    # Distribution matching: level and noise at which teacher and critic judge a student's latent
    STUDENT_LEVEL = 14
    STUDENT_NOISE = 15
    # Student latents for the critic, and the level and noise at which the critic learns them
    CRITIC_STEP = 16
    CRITIC_ROLLOUT = 17
    CRITIC_LEVEL = 18
    CRITIC_NOISE = 19
    SOUND_NOISE = 20
    SOUND_LEVELS = 21
    VALIDATION_SOUND_NOISE = 22
    GIVEN_STREAMS = 23


def pack_rng(
    *, seed: int, step: int, pack_id: int, device: torch.device, draw: Draw = Draw.NOISE
) -> torch.Generator:
    """A random generator for the pack `pack_id` at `step`, equal on every layout and rank.

    Torch's CPU generator keeps only the low 32 bits of a seed, so two of 2**32 streams may
    coincide. On CUDA all 64 bits count.
    """
    return torch.Generator(device).manual_seed(_stream(seed, step, pack_id, draw))


def _stream(seed: int, step: int, pack_id: int, draw: Draw) -> int:
    """The 64-bit seed of one `draw` of a pack, equal to child `draw` of SeedSequence.spawn."""
    sequence = np.random.SeedSequence((seed, step, pack_id), spawn_key=(int(draw),))
    return int(sequence.generate_state(1, np.uint64)[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawContext:
    """What a draw needs besides the pack: seed, step, pack id, null inputs and settings."""

    seed: int
    step: int
    pack_id: int
    null: NullInputs  # the inputs of a sample without caption
    options: ObjectiveConfig
    route: TokenRoute | None

    def rng(self, draw: Draw, device: torch.device = CPU) -> torch.Generator:
        """A generator for the numbers of one `draw`, independent of all other draws."""
        return torch.Generator(device).manual_seed(self.stream(draw))

    def stream(self, draw: Draw) -> int:
        return _stream(self.seed, self.step, self.pack_id, draw)


def _latents(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    return draw_latents(batch, context.rng(Draw.LATENTS, batch.latent_TC.device))


def _frames(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    return draw_given_frames(batch, context.options, context.rng(Draw.GIVEN_FRAMES))


def _streams(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    return draw_given_streams(batch, context.options, context.rng(Draw.GIVEN_STREAMS))


def _images(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    rate, rng = context.options.image_dropout, context.rng(Draw.IMAGE_DROPOUT)
    dropped = of_samples(batch, draw_dropout(samples_drawn(batch), rate, rng))
    return without_image(batch, dropped, context.null)


def _captions(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    dropped = dropped_captions(batch, seed=context.seed, step=context.step, options=context.options)
    return with_null_inputs(batch, dropped, context.null)


def _parts(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    share = context.options.level_share
    return batch if share is None else draw_parts(batch, share, context.rng(Draw.PARTS))


def _route(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    route = context.route
    return batch if route is None else draw_route(batch, route, context.rng(Draw.ROUTE))


def _adapters(batch: PackedBatch, context: DrawContext) -> PackedBatch:
    seed = context.stream(Draw.ADAPTER_DROPOUT) >> 1
    return batch.with_method(AdapterDropout(seed=seed))


TRAINING_DRAWS: Sequence[Callable[[PackedBatch, DrawContext], PackedBatch]] = (
    _latents,  # latents of shards that hold distributions
    _frames,  # the numbers of given frames
    _streams,  # sound that is given, or frames of a sample with sound
    _images,  # dropped images become zeros
    _captions,  # dropped captions become null inputs
    _parts,  # each sample split into two, with a noise level each
    _route,  # the tokens that the layers of a route see
    _adapters,  # the seed of the dropout in LoRA adapters
)
"""Random draws for a pack in training, in order, made before noise levels and noise.

A new draw is a function in this list and a member of `Draw`."""


def draw_given_frames(
    batch: PackedBatch, options: ObjectiveConfig, rng: torch.Generator
) -> PackedBatch:
    """A copy of the pack with a random number of given frames in each sample.

    `options.given_frames` has the relative frequencies of 0, 1, 2, ... given first frames. One
    frame is always left to learn, so an image gets none. If `given_frames` is None, each sample
    keeps the given frames of its shard with the probability `image_condition_probability`; in packs
    with texts made from pictures, it keeps its picture with that probability. `rng` is a CPU
    generator; one number is drawn for each sample.
    """
    if options.given_frames is None and options.image_condition_probability == 1:
        return batch
    uniform_N = torch.rand(samples_drawn(batch), generator=rng, dtype=torch.float64).tolist()
    uniform_N = of_samples(batch, uniform_N)
    if options.given_frames is None and batch.method(PictureTexts) is not None:
        unused = [one >= options.image_condition_probability for one in uniform_N]
        return without_pictures(batch, unused)
    if options.given_frames is None:
        kept = [one < options.image_condition_probability for one in uniform_N]
        counts = [tokens * keep for tokens, keep in zip(batch.clean_tokens, kept, strict=True)]
    else:
        edges = list(accumulate(options.given_frames))
        frames = [bisect(edges[:-1], one * edges[-1]) for one in uniform_N]
        pairs = zip(frames, batch.grids, strict=True)
        counts = [min(count, f - 1) * h * w for count, (f, h, w) in pairs]
    return with_clean_tokens(batch, counts)


def draw_given_streams(
    batch: PackedBatch, options: ObjectiveConfig, rng: torch.Generator
) -> PackedBatch:
    """A copy of the pack in which some samples with sound have given sound or given frames.

    The given part is the whole sound, a beginning of it, or all frames. `rng` is a CPU generator;
    three numbers are drawn for each sample, even for one without sound.
    """
    sound = batch.others.get(SOUND)
    if sound is None or not (options.gives_sound or options.video_given):
        return batch
    uniform_3N = torch.rand(3, batch.num_samples, generator=rng, dtype=torch.float64).tolist()
    frames, heard = list(batch.clean_tokens), [0] * batch.num_samples
    for n, (which, is_prefix, share) in enumerate(zip(*uniform_3N, strict=True)):
        tokens = sound.latent_tokens[n]
        if which < options.video_given:
            frames[n] = batch.latent_tokens[n] if tokens else frames[n]
        elif which < options.video_given + options.sound_given:
            heard[n] = tokens
        elif is_prefix < options.sound_prefix:
            heard[n] = int(share * tokens)
    if options.video_given:
        batch = with_clean_tokens(batch, frames)
    if options.gives_sound:
        batch = replace(batch, others={**batch.others, SOUND: with_clean_tokens(sound, heard)})
    return batch


def is_given(batch: PackedBatch) -> list[bool]:
    """One bool per sample: True if all its frames, or its whole sound, are given.

    All are False in packs without sound.
    """
    given = [False] * batch.num_samples
    if batch.others:
        for stream in batch.streams.values():
            pairs = zip(stream.latent_tokens, stream.clean_tokens, strict=True)
            given = [
                one or 0 < tokens == clean
                for one, (tokens, clean) in zip(given, pairs, strict=True)
            ]
    return given


def without_pictures(batch: PackedBatch, dropped: Sequence[bool]) -> PackedBatch:
    """A copy of the pack in which the samples marked in `dropped` have no picture.

    Their condition channels are zeros, and texts made from pictures have no rows.
    """
    if not any(dropped):
        return batch
    if batch.condition_TC is not None:
        dropped_N = to_device(torch.tensor(dropped), batch.segment_T.device)
        condition_TC = batch.condition_TC.masked_fill(dropped_N[batch.segment_T, None], 0)
        batch = replace(batch, condition_TC=condition_TC)
    pictures = batch.method(PictureTexts)
    for name in pictures.names if pictures is not None else ():
        rows_LE, spans = batch.texts[name], pairwise(batch.text_offsets[name])
        each = [rows_LE[a : a if drop else b] for drop, (a, b) in zip(dropped, spans, strict=True)]
        offsets = tuple(accumulate(map(len, each), initial=0))
        batch = batch.with_text(name, torch.cat(each), offsets)
    return batch


Stream = TypeVar("Stream", bound=TokenStream)


def with_clean_tokens(batch: Stream, counts: Sequence[int]) -> Stream:
    """A copy of `batch` in which the first `counts[n]` latent tokens of sample n are given.

    A given token has no noise and no loss. `batch` must not be split between context ranks yet. The
    GPU is not synchronized.
    """
    assert batch.share.count == 1, "draws are made before a pack is split"
    clean = batch.method(CleanTokens)
    assert clean is not None or not any(counts), "given tokens have no level"
    numbers = torch.tensor([batch.starts[:-1], batch.latent_tokens, counts])
    numbers_T = to_device(numbers, batch.segment_T.device)[:, batch.segment_T]
    start_T, own_T, clean_T = numbers_T.unbind()
    row_T = torch.arange(len(start_T), device=start_T.device) - start_T
    is_own_T, is_clean_T = row_T < own_T, row_T < clean_T
    level_row_T = batch.segment_T + batch.num_samples * is_clean_T
    given = replace(
        batch,
        is_target_T=is_own_T & ~is_clean_T,
        level_row_T=torch.where(is_own_T, level_row_T, batch.level_row_T),
    )
    return given if clean is None else given.with_method(replace(clean, counts=tuple(counts)))


def draw_dropout(count: int, probability: float, rng: torch.Generator) -> list[bool]:
    """Draws for each of `count` samples whether it drops an input: True with `probability`.

    `rng` is a CPU generator.
    """
    return (torch.rand(count, generator=rng, dtype=torch.float64) < probability).tolist()


def samples_drawn(batch: PackedBatch) -> int:
    """Number of samples with random draws of their own; the two samples of a pair count as one."""
    return batch.num_samples // batch.copies


def of_samples(batch: PackedBatch, drawn: Sequence[Any]) -> list[Any]:
    """The values `drawn`, one for each sample of the pack; both samples of a pair get the same."""
    return [one for one in drawn for _ in range(batch.copies)]


def dropped_captions(
    batch: PackedBatch, *, seed: int, step: int, options: ObjectiveConfig
) -> list[bool]:
    """One bool per sample of the pack: True if it trains without its caption at `step`."""
    rng = pack_rng(seed=seed, step=step, pack_id=batch.pack_id, device=CPU, draw=Draw.TEXT_DROPOUT)
    if options.given_text_dropout is None or not batch.others:
        return of_samples(batch, draw_dropout(samples_drawn(batch), options.text_dropout, rng))
    uniform_N = torch.rand(batch.num_samples, generator=rng, dtype=torch.float64).tolist()
    rates = options.text_dropout, options.given_text_dropout
    return [u < rates[given] for u, given in zip(uniform_N, is_given(batch), strict=True)]


def with_null_inputs(batch: PackedBatch, dropped: Sequence[bool], null: NullInputs) -> PackedBatch:
    """A copy of the pack in which samples marked in `dropped` have the inputs of an empty caption.

    `null` maps the name of each input to its value for an empty caption. The main text of a sample
    is replaced by its own null text, if it has one. The function does not wait for the device.

    Raises:
        ValueError: an input of `null` has another width than in the pack.
    """
    for name, value in null.items():
        packed = batch.vectors[name] if name in batch.vectors else batch.texts[name]
        if value.shape[-1] != packed.shape[-1]:
            raise ValueError(
                f"the null input `{name}` has shape {list(value.shape)}, but the dataset's"
                f" `{name}` has width {packed.shape[-1]}; encode the empty caption with the text"
                " encoder of the dataset"
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
    return replace(batch, vectors=vectors).without(NullTexts)


def own_null_texts(batch: PackedBatch) -> list[Tensor]:
    """Rows [M, E] that replace the main text of each sample of `batch` if it is dropped.

    M is 0 for a sample without such rows; the null input of the pack then replaces its text.
    """
    own = batch.method(NullTexts)
    if own is None:
        return [batch.text_LE[:0]] * batch.num_samples
    return [own.rows_LE[a:b] for a, b in pairwise(own.starts)]


def without_image(batch: PackedBatch, dropped: Sequence[bool], null: NullInputs) -> PackedBatch:
    """A copy of the pack in which samples marked in `dropped` have zeros for inputs from pictures.

    These inputs are the condition channels, and the texts and vectors that `null` lacks because
    they do not depend on the caption. The texts keep their numbers of rows. In packs with
    `PictureTexts` the sample loses the rows of these texts instead. Given frames do not change.
    """
    if not any(dropped):
        return batch
    if batch.method(PictureTexts) is not None:
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
