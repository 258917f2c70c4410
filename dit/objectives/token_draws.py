"""Random subsets of each sample's tokens: for a token route, and for two noise levels."""

# T packed tokens, L text tokens, E text width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from dit.batch import (
    CleanTokens,
    ConditionLevels,
    PackedBatch,
    Pairs,
    Parts,
    ReferenceGrids,
    Route,
)
from dit.config.sparsity import TokenRoute, TokenShare
from dit.pack_wire import to_device


def draw_route(batch: PackedBatch, route: TokenRoute, rng: torch.Generator) -> PackedBatch:
    """A copy of the pack with a random choice of the tokens that the layers of `route` see.

    The choice is stored as `Route` in the pack's methods. `rng` is a CPU generator.
    """
    move_T = _draw(batch, route, rng) - torch.arange(batch.starts[-1])
    return batch.with_method(Route(move_T=to_device(move_T, batch.segment_T.device)))


def _draw(batch: PackedBatch, share: TokenShare, rng: torch.Generator) -> Tensor:
    """A random permutation [T] of the tokens of a pack, on the CPU.

    Each sample is cut into runs of `share.run` neighbours. In each run, `share.kept` randomly
    chosen tokens come first, then the others; in a run that padding completes, real tokens are
    chosen before padding. A sample's choice depends on the number of real tokens before it.
    """
    assert batch.share.count == 1, "draws are made before a pack is split"
    rows = []
    for real, (start, stop) in zip(batch.num_tokens, pairwise(batch.starts), strict=True):
        runs = -(-real // share.run)
        chance = torch.rand(runs, share.run, generator=rng, dtype=torch.float64)
        chance.view(-1)[real:] = 1  # behind all real tokens
        parts = chance.argsort(stable=True).split((share.kept, share.run - share.kept), dim=1)
        order = torch.cat([part.sort(1).values for part in parts], dim=1)
        place = order + share.run * torch.arange(runs)[:, None]
        rows += [start + place.flatten(), torch.arange(start + runs * share.run, stop)]
    return torch.cat(rows)


def draw_parts(batch: PackedBatch, share: TokenShare, rng: torch.Generator) -> PackedBatch:
    """A copy of the pack in which the tokens of each sample are split at random into two samples.

    In each run of `share.run` neighbours, `share.kept` tokens go to the first sample and the others
    to the second. Tokens keep their positions, and both samples have all texts and vectors of the
    original. They get a noise level each, and do not attend to each other. A sample stays whole if
    it is so short that one of the two would have no loss. `rng` is a CPU generator.

    Source: dual-timestep scheduling of Self-Flow, with separate attention (arXiv:2607.02508).
    """
    assert Pairs not in batch.methods and ConditionLevels not in batch.methods and not batch.others
    order_T, clean = _draw(batch, share, rng), batch.clean_tokens
    rows, sources, counts = list[Tensor](), list[int](), list[list[int]]()
    samples = zip(clean, batch.latent_tokens, batch.num_tokens, pairwise(batch.starts), strict=True)
    for number, (given, target, real, (start, stop)) in enumerate(samples):
        runs = order_T[start:stop].view(-1, share.run)
        parts = [part.flatten() for part in runs.split((share.kept, share.run - share.kept), dim=1)]
        ends = torch.tensor([given, target, real])
        found = [(part[:, None] - start < ends).sum(0).tolist() for part in parts]
        if any(own == lost for lost, own, _ in found):
            parts, found = [torch.arange(start, stop)], [[given, target, real]]
        rows, counts = rows + parts, counts + found
        sources += [number] * len(parts)
    return _of_parts(batch, rows, sources, counts)


def _of_parts(
    batch: PackedBatch, rows: Sequence[Tensor], sources: Sequence[int], counts: Sequence[list[int]]
) -> PackedBatch:
    """A pack whose new sample i has the tokens `rows[i]` of the sample `sources[i]` of `batch`.

    `counts[i]` has its numbers of clean tokens, of latent tokens, and of real tokens.
    """
    lengths, where = [len(part) for part in rows], batch.segment_T.device
    clean, targets, real = map(tuple, zip(*counts, strict=True))
    starts = tuple(accumulate(lengths, initial=0))
    parted = batch.partial(to_device(torch.cat([*rows]), where), starts=starts, kept_tokens=real)
    owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    segment_T = to_device(owners, where)
    is_clean_T = parted.level_row_T >= batch.num_samples
    chosen = to_device(torch.tensor([*sources]), where)
    each: dict[str, Any] = {
        name: tuple(getattr(batch, name)[sample] for sample in sources)
        for name in ("grids", "keys", "captions")
        if getattr(batch, name)
    }
    for name, rows_LE in batch.texts.items():
        spans = [*pairwise(batch.text_offsets[name])]
        texts = [rows_LE[slice(*spans[sample])] for sample in sources]
        offsets = tuple(accumulate(map(len, texts), initial=0))
        parted = parted.with_text(name, torch.cat(texts), offsets)
    if (references := batch.method(ReferenceGrids)) is not None:
        of_parts = tuple(references.of[sample] for sample in sources)
        parted = parted.with_method(ReferenceGrids(of=of_parts))
    if (given := batch.method(CleanTokens)) is not None:
        parted = parted.with_method(replace(given, counts=clean))
    parted = parted.with_method(Parts(of=tuple(sources), targets=targets))
    return replace(
        parted,
        **each,
        segment_T=segment_T,
        level_row_T=segment_T + len(rows) * is_clean_T,
        vectors={name: value[chosen] for name, value in batch.vectors.items()},
        fps_N=batch.fps_N[chosen],
    )
