"""What a part of a network consists of and costs: linears, attentions, other weights.

What the backward pass needs of a part, and of which path it is (`KeptBy`), are numbers kept by
autograd. They were counted in bfloat16 with autograd's saved-tensor hooks, as on CUDA, for each
token and unit of width (`tests/unit/models/test_kept.py` counts them anew for each named network).
A modulated part keeps its input, what it makes of it and its output; without the fused kernels also
the normalised input and, for each token, scale and gate. Tables (Wan) are float32, and so are norms
across heads without the fused kernels. A feed-forward keeps input and output of its activation.
"""

# D model width; n latent tokens, m text tokens

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Flag, auto
from typing import Any


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
# Three heads of queries for one of keys, whose repeated keys and values are kept.
GROUPED = KeptBy(fused=Kept(inside=16 / 3, outside=10), eager=Kept(inside=16 / 3, outside=14))
SECOND = KeptBy(fused=Kept(inside=8, outside=2), eager=Kept(inside=8, outside=5))


def gathered(ranks: int) -> KeptBy:
    """On top of `EXCHANGED`, where each of `ranks` holds keys and values of all tokens instead."""
    both = Kept(inside=2 * ranks - 3)
    return KeptBy(fused=both, eager=both)


def of_feed_forward(hidden: int, width: int, *, gated: bool = False) -> KeptBy:
    """`gated`: a gate, its activation, what it multiplies and their product."""
    both = Kept(inside=(4 if gated else 2) * hidden / width)
    return KeptBy(fused=both, eager=both)


class RowKind(Flag):
    """What a linear runs over, or what attends: tokens, or one row for each sample."""

    LATENTS = auto()
    TEXT = auto()
    SAMPLES = auto()
    # Those of the latents that are references, where layers of their own see them: the layers of
    # the others count them all, because a token passes one kind
    REFERENCES = auto()
    JOINT = LATENTS | TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """A matrix, which is as many multiplications for each row as it has weights."""

    inputs: int
    outputs: int
    rows: RowKind = RowKind.LATENTS
    bias: bool = False
    split: bool = False  # whether tensor ranks share it; a bias then counts as shared as well
    times: int = 1  # rows of each sample, where an input has as many in all samples
    parts: int = 1  # linears of the published network that it is made of: queries, keys, values


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Every query of a sample with every key of it; `width` is that of all heads together."""

    width: int
    queries: RowKind = RowKind.LATENTS
    keys: RowKind = RowKind.LATENTS
    times: int = 1  # keys of each sample, where `keys` is SAMPLES
    seen: float = 1
    """Pairs of a query and a key for each pair of tokens, where queries see a part of the keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightShape:
    """Weights outside of matrices: norms, tables."""

    numbers: int
    split: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a part of a network consists of; parts add up."""

    linears: tuple[LinearShape, ...] = ()
    attentions: tuple[AttentionShape, ...] = ()
    weights: tuple[WeightShape, ...] = ()
    exchanges: int = 0
    """Times that tensor ranks gather tokens, compute with split matrices, and scatter them."""
    kept: KeptBy = NOTHING
    """What the backward pass needs for each latent token."""
    kept_of_text: KeptBy = NOTHING
    """Likewise, for each text token and row of an image."""
    kept_exchanged: KeptBy = NOTHING
    """More than `kept` where context ranks exchange heads; joint rows keep that anyway."""
    cube_heads: int = 0
    """Heads that score all pairs of cubes of a pack (`AttentionSpec.sparse_pairs`)."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            linears=self.linears + other.linears,
            attentions=self.attentions + other.attentions,
            weights=self.weights + other.weights,
            exchanges=self.exchanges + other.exchanges,
            kept=self.kept + other.kept,
            kept_of_text=self.kept_of_text + other.kept_of_text,
            kept_exchanged=self.kept_exchanged + other.kept_exchanged,
            cube_heads=self.cube_heads + other.cube_heads,
        )

    def parameters(self, *, tensor: int = 1) -> int:
        """On one of `tensor` tensor ranks."""
        sizes = [((one.inputs + one.bias) * one.outputs, one.split) for one in self.linears]
        sizes += [(one.numbers, one.split) for one in self.weights]
        return sum(size // tensor if split else size for size, split in sizes)

    def matrix_numbers(self, *, tensor: int = 1) -> int:
        """Those of `parameters` that are in matrices."""
        sizes = [(one.inputs * one.outputs, one.split) for one in self.linears]
        return sum(size // tensor if split else size for size, split in sizes)

    @property
    def matrix_rows(self) -> int:
        """Of all matrices, over all tensor ranks."""
        return sum(one.outputs for one in self.linears)

    def adapter_numbers(self, rank: int, *, tensor: int = 1) -> int:
        """Of adapters of the split matrices: an A and a B for each part of a matrix.

        Of `tensor` tensor ranks, each has either whole and its share of the other: about half each.
        """
        ends = [one.parts * one.inputs + one.outputs for one in self.linears if one.split]
        return rank * sum(ends) * (tensor + 1) // (2 * tensor)

    @property
    def in_attention(self) -> Multiplications:
        """Those of `multiplications` that attention makes."""
        return _of_attentions(self.attentions)

    @property
    def multiplications(self) -> Multiplications:
        return _of_linears(self.linears) + self.in_attention

    @property
    def token_multiplications(self) -> int:
        """Of the linears, for each latent token."""
        return _of_linears(self.linears).n


@dataclass(frozen=True, slots=True)
class Multiplications:
    """Of a forward pass over a sample, as a polynomial in its n latent and m text tokens."""

    sample: int = 0
    n: int = 0
    m: int = 0
    nn: float = 0  # an integer unless queries see a share of the keys
    nm: int = 0
    mm: int = 0

    def __add__(self, other: Multiplications) -> Multiplications:
        return Multiplications(*(a + b for a, b in zip(self._all(), other._all(), strict=True)))

    def times(self, count: int) -> Multiplications:
        return Multiplications(*(count * one for one in self._all()))

    def _all(self) -> tuple[Any, ...]:
        return (self.sample, self.n, self.m, self.nn, self.nm, self.mm)

    def of(self, tokens: Sequence[int], text: Sequence[int]) -> int:
        """Of samples with so many latent and text tokens."""
        total = self.sample * len(tokens) + self.n * sum(tokens) + self.m * sum(text)
        for n, m in zip(tokens, text, strict=True):
            total += round(self.nn * n * n) + self.nm * n * m + self.mm * m * m
        return total


def _of_linears(linears: Iterable[LinearShape]) -> Multiplications:
    total: dict[RowKind, int] = dict.fromkeys(RowKind, 0)
    for one in linears:
        for rows in one.rows:
            total[rows] += one.inputs * one.outputs * one.times
    return Multiplications(total[RowKind.SAMPLES], total[RowKind.LATENTS], total[RowKind.TEXT])


def _of_attentions(attentions: Iterable[AttentionShape]) -> Multiplications:
    """Queries with keys, and weights with values: 2 D for each pair."""
    n = nn = nm = mm = 0
    for one in attentions:
        if one.keys is RowKind.SAMPLES:
            assert one.queries is RowKind.LATENTS
            n += 2 * one.width * one.times
            continue
        if one.queries is RowKind.REFERENCES:
            continue
        for query in one.queries:
            for key in one.keys:
                text = (query is RowKind.TEXT) + (key is RowKind.TEXT)
                nn += 2 * one.width * (text == 0) * one.seen
                nm += 2 * one.width * (text == 1)
                mm += 2 * one.width * (text == 2)
    return Multiplications(n=n, nn=nn, nm=nm, mm=mm)
