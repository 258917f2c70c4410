"""What the backward pass needs of a layer, and of which path it is: numbers kept by autograd.

Counted in bfloat16 with autograd's saved-tensor hooks, as on CUDA, for each token and unit of width
(`tests/unit/models/test_kept.py` counts them anew for each named network). A modulated part keeps
its input, what it makes of it and its output; without the fused kernels also the normalised input
and, for each token, scale and gate. Tables (Wan) are float32, and so are norms across heads without
the fused kernels. A feed-forward keeps input and output of its activation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Numbers for each token and unit of width."""

    inside: float = 0.0
    """Of what lies between split matrices, which tensor ranks share."""
    outside: float = 0.0
    """Of all else, which sequence parallelism splits."""
    inside_float32: float = 0.0
    """Like `inside`, of float32 whatever the precision."""
    outside_float32: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        names = [one.name for one in fields(Kept)]
        return Kept(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def bytes(self, size: int, *, tensor: int = 1, sequence_parallel: bool = False) -> float:
        """On one of `tensor` tensor ranks, of numbers of `size` bytes."""
        inside = size * self.inside + 4 * self.inside_float32
        outside = size * self.outside + 4 * self.outside_float32
        return inside / tensor + outside / (tensor if sequence_parallel else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBy:
    """With the fused kernels of norms, modulation and rotation, and without them."""

    fused: Kept
    eager: Kept

    def __add__(self, other: KeptBy) -> KeptBy:
        return KeptBy(fused=self.fused + other.fused, eager=self.eager + other.eager)


NOTHING = KeptBy(fused=Kept(), eager=Kept())

MODULATED = KeptBy(fused=Kept(outside=3), eager=Kept(outside=6))
BY_TABLE = KeptBy(fused=Kept(outside=3), eager=Kept(outside=1, outside_float32=4))
AFFINE = KeptBy(fused=Kept(outside=2), eager=Kept(outside=2, outside_float32=2))

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

JOINT = KeptBy(fused=Kept(inside=8), eager=Kept(inside=7))
JOINT_WITHOUT_NORM = KeptBy(fused=Kept(inside=5), eager=Kept(inside=5))
SINGLE = KeptBy(fused=Kept(inside=7), eager=Kept(inside=9))
SECOND = KeptBy(fused=Kept(inside=8, outside=2), eager=Kept(inside=8, outside=5))


def gathered(ranks: int) -> KeptBy:
    """On top of `EXCHANGED`, where each of `ranks` holds keys and values of all tokens instead."""
    both = Kept(inside=2 * ranks - 3)
    return KeptBy(fused=both, eager=both)


def of_feed_forward(hidden: int, width: int) -> KeptBy:
    both = Kept(inside=2 * hidden / width)
    return KeptBy(fused=both, eager=both)
