"""Token rows, and which tokens attend to which."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto


class RowKind(Flag):
    """What a layer processes of a sample: tokens of one kind, or one row for the whole sample."""

    LATENTS = auto()
    TEXT = auto()
    SAMPLES = auto()
    # Those of the latents that are references, where layers of their own see them: the layers of
    # the others count them all, because a token passes one kind
    REFERENCES = auto()
    SOUND = auto()
    JOINT = LATENTS | TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Attention of every query of a sample to every key of the sample.

    `width` is the sum over all heads.
    """

    width: int
    queries: RowKind = RowKind.LATENTS
    keys: RowKind = RowKind.LATENTS
    times: int = 1  # keys of each sample, where `keys` is SAMPLES
