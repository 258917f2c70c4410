"""Rows of tokens, attention between them, and memory that the backward pass needs for each part.

The memory, with and without fused kernels (`KeptBy`), is in numbers that autograd keeps for each
token and unit of width. They were counted in bfloat16 with autograd's saved-tensor hooks, as on
CUDA (`tests/unit/models/test_kept.py` counts them again for each named network). A modulated part
keeps its input, the modulated input and its output; without the fused kernels also the normalised
input and, for each token, scale and gate. Tables (Wan) are float32, and so are norms across heads
without the fused kernels. A feed-forward keeps input and output of its activation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Flag, auto


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Numbers kept for each token and unit of width."""

    inside: float = 0.0
    """Numbers between two split matrices, which tensor ranks divide."""
    outside: float = 0.0
    """All other numbers, which sequence parallelism splits."""
    inside_float32: float = 0.0
    """Like `inside`, of float32 whatever the precision."""
    outside_float32: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        names = [one.name for one in fields(Kept)]
        return Kept(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def bytes(self, size: int, *, tensor: int = 1, sequence_parallel: bool = False) -> float:
        """Bytes on one of `tensor` tensor ranks, for numbers of `size` bytes."""
        inside = size * self.inside + 4 * self.inside_float32
        outside = size * self.outside + 4 * self.outside_float32
        return inside / tensor + outside / (tensor if sequence_parallel else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBy:
    """Numbers kept with the fused kernels of norms, modulation and rotation, and without them."""

    fused: Kept
    eager: Kept

    def __add__(self, other: KeptBy) -> KeptBy:
        return KeptBy(fused=self.fused + other.fused, eager=self.eager + other.eager)


NOTHING = KeptBy(fused=Kept(), eager=Kept())

MODULATED = KeptBy(fused=Kept(outside=3), eager=Kept(outside=6))
BY_TABLE = KeptBy(fused=Kept(outside=3), eager=Kept(outside=1, outside_float32=4))
AFFINE = KeptBy(fused=Kept(outside=2), eager=Kept(outside=2, outside_float32=2))
# Tokens that a part reads as they are; two parts modulated by tables stand around it as above.
UNCHANGED = KeptBy(fused=Kept(outside=1), eager=Kept(outside=1, outside_float32=2))

SELF = KeptBy(fused=Kept(inside=6), eager=Kept(inside=8))
# Of queries, and of what attention makes; keys and values of text keep as much.
CROSS = KeptBy(fused=Kept(inside=3), eager=Kept(inside=3))
SELF_ACROSS_HEADS = KeptBy(fused=SELF.fused, eager=Kept(inside=5, inside_float32=4))
CROSS_ACROSS_HEADS = KeptBy(fused=CROSS.fused, eager=Kept(inside=3, inside_float32=2))
# More of self-attention where context ranks exchange heads (a2a): queries, keys and values of the
# heads that meet, and their output, beside what a rank makes itself. The backward pass of the fused
# norm across heads needs that, too; without the fused kernels, a copy frees the row it was made of.
EXCHANGED = KeptBy(fused=Kept(inside=2), eager=Kept(inside=-1))
EXCHANGED_ACROSS_HEADS = KeptBy(fused=Kept(inside=4), eager=Kept(inside=-1))
OF_IMAGE = KeptBy(fused=Kept(inside=1), eager=Kept(inside=1))
# More of attention among cubes of tokens: the gate, and what the kernel makes in their order.
OF_CUBES = KeptBy(fused=Kept(inside=2), eager=Kept(inside=2))

JOINT = KeptBy(fused=Kept(inside=8), eager=Kept(inside=7))
JOINT_ACROSS_HEADS = KeptBy(fused=JOINT.fused, eager=Kept(inside=4, inside_float32=4))
JOINT_WITHOUT_NORM = KeptBy(fused=Kept(inside=5), eager=Kept(inside=5))
SINGLE = KeptBy(fused=Kept(inside=7), eager=Kept(inside=9))
SEQUENTIAL = KeptBy(fused=Kept(inside=6, outside=10), eager=Kept(inside=8, outside=14))
# Less without norms after attention and MLP, and more where a norm of heads is not fused.
NOT_AFTER = KeptBy(fused=Kept(outside=-2), eager=Kept(outside=-2))
TWISTED = KeptBy(fused=Kept(inside=2), eager=Kept())
# More of norms whose weights are stored less 1, of tokens and of heads: their inputs in float32.
CENTRED = KeptBy(fused=Kept(outside=2), eager=Kept(outside=2))
CENTRED_HEADS = KeptBy(fused=Kept(inside=1.25), eager=Kept(inside=1.25))
# A gate of the output of attention, and their product.
OUTPUT_GATE = KeptBy(fused=Kept(inside=2), eager=Kept(inside=2))
# More where rows of float32 modulate tokens: these, and the rows spread over them.
FLOAT32_ROWS = KeptBy(fused=Kept(), eager=Kept(outside=8))
# Three heads of queries for one of keys, whose repeated keys and values are kept.
GROUPED = KeptBy(fused=Kept(inside=16 / 3, outside=10), eager=Kept(inside=16 / 3, outside=14))
SECOND = KeptBy(fused=Kept(inside=8, outside=2), eager=Kept(inside=8, outside=5))


def gathered(ranks: int) -> KeptBy:
    """Numbers kept beyond `EXCHANGED` if each of `ranks` holds keys and values of all tokens."""
    both = Kept(inside=2 * ranks - 3)
    return KeptBy(fused=both, eager=both)


def of_feed_forward(hidden: int, width: int, *, gated: bool = False) -> KeptBy:
    """Numbers kept by a feed-forward; if `gated`: gate, activation, factor and product."""
    both = Kept(inside=(4 if gated else 2) * hidden / width)
    return KeptBy(fused=both, eager=both)


class RowKind(Flag):
    """What a layer computes, or what attends: tokens, or one row for each sample."""

    LATENTS = auto()
    TEXT = auto()
    SAMPLES = auto()
    # Those of the latents that are references, where layers of their own see them: the layers of
    # the others count them all, because a token passes one kind
    REFERENCES = auto()
    JOINT = LATENTS | TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Attention of every query of a sample to every key of it.

    `width` is that of all heads together.
    """

    width: int
    queries: RowKind = RowKind.LATENTS
    keys: RowKind = RowKind.LATENTS
    times: int = 1  # keys of each sample, where `keys` is SAMPLES


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNeeds:
    """What the tokens of a layer attend to, exchange and keep; parts are summed."""

    attentions: tuple[AttentionShape, ...] = ()
    exchanges: int = 0
    """Times that tensor ranks gather tokens, compute with split matrices, and scatter them."""
    kept: KeptBy = NOTHING
    """What the backward pass needs for each latent token."""
    kept_of_text: KeptBy = NOTHING
    """What the backward pass needs for each text token and row of an image."""
    kept_exchanged: KeptBy = NOTHING
    """More than `kept` where context ranks exchange heads; joint rows keep that anyway."""
    cube_heads: int = 0
    """Heads that score all pairs of cubes of a pack (`AttentionSpec.sparse_pairs`)."""

    def __add__(self, other: LayerNeeds) -> LayerNeeds:
        names = [one.name for one in fields(LayerNeeds)]
        return LayerNeeds(**{name: getattr(self, name) + getattr(other, name) for name in names})
