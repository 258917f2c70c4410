"""Attention shapes: which tokens of a sample attend to which."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto


class RowKind(Flag):
    """The tokens of a sample that a layer processes."""

    LATENTS = auto()
    TEXT = auto()
    SAMPLES = auto()  # a fixed number of rows for each sample
    # Reference latents, in layers for references alone. Layers for the target count all latents as
    # LATENTS, although a token uses only one of the two kinds of layers.
    REFERENCES = auto()
    SOUND = auto()
    JOINT = LATENTS | TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Attention of all queries of a sample to all keys of the sample."""

    width: int  # of all heads together
    queries: RowKind = RowKind.LATENTS
    keys: RowKind = RowKind.LATENTS
    times: int = 1  # number of keys of each sample, if `keys` is SAMPLES
