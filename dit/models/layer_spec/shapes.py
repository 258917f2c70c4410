"""What a part of a network consists of and costs: linears, attentions, other weights."""

# D model width; n latent tokens, m text tokens

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto

from dit.models.layer_spec.kept import NOTHING, KeptBy


class RowKind(Flag):
    """What a linear runs over, or what attends: tokens, or one row for each sample."""

    LATENTS = auto()
    TEXT = auto()
    SAMPLES = auto()
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

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            linears=self.linears + other.linears,
            attentions=self.attentions + other.attentions,
            weights=self.weights + other.weights,
            exchanges=self.exchanges + other.exchanges,
            kept=self.kept + other.kept,
            kept_of_text=self.kept_of_text + other.kept_of_text,
            kept_exchanged=self.kept_exchanged + other.kept_exchanged,
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
    nn: int = 0
    nm: int = 0
    mm: int = 0

    def __add__(self, other: Multiplications) -> Multiplications:
        return Multiplications(*(a + b for a, b in zip(self._all(), other._all(), strict=True)))

    def times(self, count: int) -> Multiplications:
        return Multiplications(*(count * one for one in self._all()))

    def _all(self) -> tuple[int, ...]:
        return (self.sample, self.n, self.m, self.nn, self.nm, self.mm)

    def of(self, tokens: Sequence[int], text: Sequence[int]) -> int:
        """Of samples with so many latent and text tokens."""
        total = self.sample * len(tokens) + self.n * sum(tokens) + self.m * sum(text)
        for n, m in zip(tokens, text, strict=True):
            total += self.nn * n * n + self.nm * n * m + self.mm * m * m
        return total


def _of_linears(linears: Iterable[LinearShape]) -> Multiplications:
    total: dict[RowKind, int] = dict.fromkeys(RowKind.SAMPLES | RowKind.JOINT, 0)
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
        for query in one.queries:
            for key in one.keys:
                text = (query is RowKind.TEXT) + (key is RowKind.TEXT)
                nn += 2 * one.width * (text == 0)
                nm += 2 * one.width * (text == 1)
                mm += 2 * one.width * (text == 2)
    return Multiplications(n=n, nn=nn, nm=nm, mm=mm)
