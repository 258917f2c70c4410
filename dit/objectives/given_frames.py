"""Which frames at the beginning of a target are given: as its shard says, or drawn for each sample.

A given frame has no noise and no loss. What is drawn are counts, on the CPU; the pack that was read
holds the latents of all frames, so that nothing but its masks changes. Where the frame is shown in
channels beside the noisy ones (HunyuanVideo 1.5), a sample that does not use it has zeros there.
"""

# T packed tokens, N samples in a pack

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from dit.batch import PackedBatch
from dit.config import ObjectiveConfig
from dit.pack_wire import to_device


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
    uniform_N = torch.rand(batch.num_samples, generator=rng, dtype=torch.float64).tolist()
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
