"""Tokens of a pack -> inputs of its samples (the inverse of packing)."""

# C patch features = c * pt * p * p, T packed tokens; F H W frames, rows, columns of a latent
# N samples, E width of a vector

from __future__ import annotations

import math
from itertools import accumulate, pairwise

from torch import Tensor

from dit.batch import PackedBatch
from dit.data.pack import PatchLayout
from dit.models.family import InputKind
from dit.models.positions import unpatchify


def sample_inputs(batch: PackedBatch, index: int, layout: PatchLayout) -> dict[str, Tensor]:
    """What the sample at `index` of a whole pack has beside its latent, by name, as copies."""
    found = {}
    for name, starts in batch.text_offsets.items():
        found[name] = batch.texts[name][starts[index] : starts[index + 1]].clone()
    for name in layout.named(InputKind.NULL_TEXT):
        if batch.null_text_LE is not None:
            first, stop = batch.null_text_starts[index : index + 2]
            found |= {name: batch.null_text_LE[first:stop].clone()} if stop > first else {}
    found |= {name: rows_NE[index].clone() for name, rows_NE in batch.vectors.items()}
    grid, first = batch.grids[index], batch.starts[index]
    patch = (layout.patch_temporal, layout.patch_spatial)
    clean = batch.clean_tokens[index] if batch.clean_tokens else 0
    if clean:
        (name,) = layout.named(InputKind.FRAMES)
        frames = (clean // math.prod(grid[1:]), *grid[1:])
        found[name] = unpatchify(batch.latent_TC[first:], frames, *patch).clone()
    others = batch.references[index] if batch.references else ()
    starts = accumulate(map(math.prod, (grid, *others)), initial=first)
    for name, other, (at, _) in zip(
        layout.named(InputKind.REFERENCE), others, pairwise([*starts][1:]), strict=False
    ):
        found[name] = unpatchify(batch.latent_TC[at:], other, *patch).clone()
    if batch.condition_TC is not None:
        channels_CFHW = unpatchify(batch.condition_TC[first:], grid, *patch)
        kinds = (InputKind.CHANNELS, InputKind.FRAME_CHANNELS)
        named = [one for one in layout.inputs if one.kind in kinds]
        masks = [one.kind is InputKind.FRAME_CHANNELS for one in named]
        parts = channels_CFHW.split([one.width + m for one, m in zip(named, masks, strict=True)])
        for one, part, has_mask in zip(named, parts, masks, strict=True):
            if not has_mask:
                found[one.name] = part.clone()
            elif frames := int((part[-1, :, 0, 0] > 0).sum()):
                found[one.name] = part[:-1, :frames].clone()
    return found
