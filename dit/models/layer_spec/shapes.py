"""Sizes and choices of the layers of a network, and what each of them costs.

1. Cost    which linears a part of a network has and over which rows they run, who attends to whom,
           which other weights there are; costs add up
2. specs   attention, feed-forward, modulation, and the layers made of them; each has its cost

A family describes its network by these values alone, so that parameters, operations, memory and the
cut into pipeline stages follow from one description. Nothing here needs torch: a plan for a cluster
is made on machines without it.

What the backward pass needs was counted with autograd's saved-tensor hooks on a CPU, in bfloat16
numbers for each token and unit of width. A modulated part keeps 4 outside of its split matrices
(`cost.KEPT_OUTSIDE`). Self-attention keeps 10 and cross-attention 5, and selective recomputation
saves 1 of them, the output. A feed-forward keeps input and output of its activation. What is
computed in float32 counts twice: norms across heads keep 2 more of queries and of keys, and table
modulation 2 for each part that it gates.
"""

# D model width, F width inside a feed-forward, K head width; n latent tokens, m text tokens

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from typing import Any

_KEPT_SELF, _KEPT_CROSS, _KEPT_IMAGE = 10, 5, 1
_FLOAT32 = 2  # of each norm across heads, and of each part with table modulation


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
    kept: float = 0.0
    """Numbers that the backward pass needs for each token and unit of width, inside of these."""
    float32_inside: float = 0.0
    """How many more there are in bfloat16, because some are float32 all the same."""
    float32_outside: float = 0.0
    """Likewise, outside of the split matrices."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            linears=self.linears + other.linears,
            attentions=self.attentions + other.attentions,
            weights=self.weights + other.weights,
            exchanges=self.exchanges + other.exchanges,
            kept=self.kept + other.kept,
            float32_inside=self.float32_inside + other.float32_inside,
            float32_outside=self.float32_outside + other.float32_outside,
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


class Activation(StrEnum):
    """What stands between the two linears of a feed-forward."""

    GELU = "gelu"  # exact (erf)
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SWIGLU = "swiglu"  # silu(gate) * up: the first linear makes both

    @property
    def inputs(self) -> int:
        """Numbers that the first linear makes for each hidden unit."""
        return 2 if self is Activation.SWIGLU else 1


class QkNorm(StrEnum):
    """RMSNorm of queries and keys."""

    NONE = "none"
    PER_HEAD = "per_head"  # over the width of each head, one weight [K] for all heads
    ACROSS_HEADS = "across_heads"  # over all heads of a token, weight [D]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Attention over one token row."""

    width: int  # D, of tokens and of all heads together
    heads: int
    bias: bool = False  # of every linear
    norm: QkNorm = QkNorm.PER_HEAD
    eps: float = 1e-6  # of that norm

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def cost(self, rows: RowKind = RowKind.LATENTS, *, output: bool = True) -> Cost:
        """Queries, keys and values of a row of tokens, and the output; not who attends to whom."""
        made = LinearShape(
            inputs=self.width,
            outputs=3 * self.width,
            rows=rows,
            bias=self.bias,
            split=True,
            parts=3,
        )
        total = Cost(linears=(made,)) + self.norms
        if not output:
            return total
        out = LinearShape(inputs=self.width, outputs=self.width, rows=rows, split=True)
        return total + Cost(linears=(out,)) + _bias(self.width, self.bias)

    def cross_cost(self, text_width: int) -> Cost:
        """Queries of latents, keys and values of text; with the attention."""
        width, bias = self.width, self.bias
        linears = (
            LinearShape(inputs=width, outputs=width, bias=bias, split=True),
            LinearShape(
                inputs=text_width,
                outputs=2 * width,
                rows=RowKind.TEXT,
                bias=bias,
                split=True,
                parts=2,
            ),
            LinearShape(inputs=width, outputs=width, split=True),
        )
        attention = AttentionShape(width=width, keys=RowKind.TEXT)
        total = Cost(
            linears=linears,
            attentions=(attention,),
            exchanges=1,
            kept=_KEPT_CROSS,
            float32_inside=self.float32_kept,
        )
        return total + _bias(width, bias) + self.norms

    def image_cost(self, text_width: int, rows: int) -> Cost:
        """What attention to `rows` rows of an image adds to `cross_cost`, with its queries."""
        made = LinearShape(
            inputs=text_width,
            outputs=2 * self.width,
            rows=RowKind.SAMPLES,
            bias=self.bias,
            split=True,
            times=rows,
            parts=2,
        )
        attention = AttentionShape(width=self.width, keys=RowKind.SAMPLES, times=rows)
        # The norm of the keys.
        norm = Cost(weights=self.norms.weights[1:])
        return Cost(linears=(made,), attentions=(attention,), kept=_KEPT_IMAGE) + norm

    @property
    def float32_kept(self) -> int:
        """`Cost.float32_inside` of the norm of queries, and as much of that of keys."""
        return _FLOAT32 if self.norm is QkNorm.ACROSS_HEADS else 0

    @property
    def norms(self) -> Cost:
        """Of queries and of keys; tensor ranks share a norm across heads by heads."""
        match self.norm:
            case QkNorm.NONE:
                return Cost()
            case QkNorm.PER_HEAD:
                return Cost(weights=(WeightShape(numbers=self.head_width),) * 2)
            case QkNorm.ACROSS_HEADS:
                return Cost(weights=(WeightShape(numbers=self.width, split=True),) * 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec:
    """Two linears with an activation between them."""

    width: int  # D
    hidden: int  # F, any number
    activation: Activation = Activation.GELU
    bias: bool = False

    def linears(self, rows: RowKind = RowKind.LATENTS) -> tuple[LinearShape, ...]:
        """Without the bias of the second, which belongs to the row that it is added to."""
        made = self.hidden * self.activation.inputs
        return (
            LinearShape(inputs=self.width, outputs=made, rows=rows, bias=self.bias, split=True),
            LinearShape(inputs=self.hidden, outputs=self.width, rows=rows, split=True),
        )

    def cost(self, rows: RowKind = RowKind.LATENTS) -> Cost:
        return Cost(linears=self.linears(rows)) + _bias(self.width, self.bias)


def _bias(width: int, bias: bool) -> Cost:
    """Of a matrix that is split by its inputs: every rank has the whole bias."""
    return Cost(weights=(WeightShape(numbers=width),) if bias else ())


def replicated(
    inputs: int,
    outputs: int,
    *,
    rows: RowKind = RowKind.LATENTS,
    bias: bool = False,
    times: int = 1,
) -> Cost:
    """A matrix that every tensor rank has whole."""
    shape = LinearShape(inputs=inputs, outputs=outputs, rows=rows, bias=bias, times=times)
    return Cost(linears=(shape,))


LEVEL_WAVES = 256
"""Cosines and sines of a noise level or a guidance scale; fixed in Diffusers."""


def condition_cost(
    width: int, *, pooled: int | None = None, guidance: bool = False, step_end: bool = False
) -> Cost:
    """Of embeddings of level, end of a step, guidance and pooled text, two linears each."""
    one_row = {"rows": RowKind.SAMPLES, "bias": True}
    total = Cost()
    texts = () if pooled is None else (pooled,)
    for inputs in (*(LEVEL_WAVES,) * (1 + guidance + step_end), *texts):
        total += replicated(inputs, width, **one_row) + replicated(width, width, **one_row)
    return total


REFINER_RATIO = 4
"""Width of a token refiner's MLPs over the hidden size; fixed in Diffusers."""
MOST_REFINER_LAYERS = 16


def refiner_cost(width: int, *, text: int, layers: int) -> Cost:
    """Of the token refiner (HunyuanVideo, HunyuanImage), which reads texts of width `text`."""
    total = condition_cost(width, pooled=text)
    rows: dict[str, Any] = {"rows": RowKind.TEXT, "bias": True}
    total += replicated(text, width, **rows)
    wide = REFINER_RATIO * width
    for _ in range(layers):
        total += replicated(width, 3 * width, **rows) + replicated(width, width, **rows)
        total += replicated(width, wide, **rows) + replicated(wide, width, **rows)
        total += replicated(width, 2 * width, rows=RowKind.SAMPLES, bias=True)
        attention = AttentionShape(width=width, queries=RowKind.TEXT, keys=RowKind.TEXT)
        norms = WeightShape(numbers=4 * width)  # weight and bias of two
        total += Cost(attentions=(attention,), weights=(norms,))
    return total


def glyph_weights(width: int, *, inputs: int, inside: int) -> WeightShape:
    """Of the embedding of ByT5's rows: a norm and three linears."""
    linears = (inputs + 1) * inside + (inside + 1) * inside + (inside + 1) * width
    return WeightShape(numbers=2 * inputs + linears)


@dataclass(frozen=True, slots=True)
class LowRankModulation:
    """Two linears D -> rank -> 3 D for each part of a layer, plus a shift that all layers share.

    Source: Cosmos (`adaln_lora_dim`).
    """

    rank: int

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates, three for each part."""
        total = Cost()
        for first in range(0, vectors, 3):
            made = min(3, vectors - first) * width
            total += replicated(width, self.rank, rows=RowKind.SAMPLES)
            total += replicated(self.rank, made, rows=RowKind.SAMPLES)
        return total


@dataclass(frozen=True, slots=True)
class PerBlockModulation:
    """One linear D -> k D for each layer and token row, split over tensor ranks (FLUX, Qwen)."""

    bias: bool = True

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates."""
        outputs, rows = vectors * width, RowKind.SAMPLES
        made = LinearShape(inputs=width, outputs=outputs, rows=rows, bias=self.bias, split=True)
        return Cost(linears=(made,))


@dataclass(frozen=True, slots=True)
class TableModulation:
    """A learned row for each scale, shift and gate, plus rows that all layers share (Wan, LTX).

    Computed in float32 whatever the type of the weights, as in Wan's published code.
    """

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates, three for each part."""
        weights = (WeightShape(numbers=vectors * width),)
        return Cost(weights=weights, float32_outside=_FLOAT32 * vectors / 3)


@dataclass(frozen=True, slots=True)
class GivenModulation:
    """Rows that one network makes for all layers together, so that layers have no weights (Chroma).

    Those of a layer follow those of the layer before it.
    """

    first: int
    """Row of the first layer of the stack."""
    first_of_text: int = 0
    """Likewise of the text of double-stream layers, whose rows are apart."""

    def cost(self, width: int, vectors: int) -> Cost:  # noqa: ARG002
        """Of a layer; the family describes the network that makes the rows."""
        return Cost()


WholeLayerModulation = PerBlockModulation | TableModulation | GivenModulation
"""One module for all parts of a layer."""
ModulationSpec = LowRankModulation | WholeLayerModulation


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossLayerSpec:
    """Self-attention, cross-attention to text and feed-forward, in turn (Cosmos, Wan)."""

    attention: AttentionSpec
    cross_attention: AttentionSpec
    text_width: int  # of the text that the layer attends to
    feed_forward: FeedForwardSpec
    modulation: ModulationSpec
    gated_cross: bool = True  # False: after an affine LayerNorm, without modulation or gate (Wan)
    learned_positions: bool = False  # whether they are added before every layer (Cosmos)
    image_rows: int | None = None
    """Rows of an image encoder in each sample, of the width of the text. Cross-attention attends to
    them with keys, values and a softmax of their own, and adds what it finds (Wan 2.1); None: it
    attends to text alone."""

    @property
    def cost(self) -> Cost:
        width = self.attention.width
        # Two exchanges, because the third is that of cross-attention.
        total = _self_attention(self.attention, self.feed_forward, RowKind.LATENTS, exchanges=2)
        total += self.attention.cost() + self.cross_attention.cross_cost(self.text_width)
        if self.image_rows is not None:
            total += self.cross_attention.image_cost(self.text_width, self.image_rows)
        total += self.feed_forward.cost()
        total += self.modulation.cost(width, 9 if self.gated_cross else 6)
        affine = () if self.gated_cross else (WeightShape(numbers=2 * width),)
        return total + Cost(weights=affine)


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubleLayerSpec:
    """Latents and text with weights of their own, and attention over both together.

    FLUX, Qwen-Image, HunyuanVideo and SD3 have such layers.
    """

    attention: AttentionSpec  # of either row
    feed_forward: FeedForwardSpec  # of either row
    modulation: WholeLayerModulation = PerBlockModulation()
    text_is_read: bool = True
    """Whether anything reads the text after the last layer. Where nothing does, the last layer does
    not compute it, and `DoubleStreamLayer.unused` names the weights that get no gradient."""
    updates_text: bool = True
    """Whether there are weights that compute the text anew (not in the last layer of SD3)."""
    second_attention: bool = False
    """Whether latents also attend to each other, apart from the text (SD3.5 medium)."""

    @property
    def cost(self) -> Cost:
        """Of a layer whose text is read, or which does not update it."""
        attention, feed_forward, width = self.attention, self.feed_forward, self.attention.width
        total = _self_attention(attention, feed_forward, RowKind.JOINT, exchanges=2)
        total += attention.cost() + feed_forward.cost()
        total += self.modulation.cost(width, 9 if self.second_attention else 6)
        if self.second_attention:
            own = AttentionShape(width=width)
            total += attention.cost()
            total += Cost(attentions=(own,), exchanges=1, kept=_KEPT_SELF)
        total += attention.cost(RowKind.TEXT, output=self.updates_text)
        if not self.updates_text:
            return total + self.modulation.cost(width, 2)
        return total + feed_forward.cost(RowKind.TEXT) + self.modulation.cost(width, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleLayerSpec:
    """Attention and feed-forward side by side, over latents and text in one row (FLUX)."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    modulation: WholeLayerModulation = PerBlockModulation()

    @property
    def cost(self) -> Cost:
        total = _self_attention(self.attention, self.feed_forward, RowKind.JOINT, exchanges=1)
        width, bias, inner = self.attention.width, self.attention.bias, self.feed_forward
        made = 3 * width + inner.hidden * inner.activation.inputs
        rows = {"rows": RowKind.JOINT, "split": True}
        linears = (
            LinearShape(inputs=width, outputs=made, bias=bias, parts=4, **rows),
            LinearShape(inputs=width + inner.hidden, outputs=width, **rows),
        )
        total += Cost(linears=linears) + _bias(width, bias) + self.attention.norms
        return total + self.modulation.cost(width, 3)


def _self_attention(
    attention: AttentionSpec, feed_forward: FeedForwardSpec, rows: RowKind, *, exchanges: int
) -> Cost:
    """Who attends to whom in a layer, and what its backward pass keeps inside split matrices."""
    width = attention.width
    return Cost(
        attentions=(AttentionShape(width=width, queries=rows, keys=rows),),
        exchanges=exchanges,
        kept=_KEPT_SELF + 2 * feed_forward.hidden / width,
        float32_inside=2 * attention.float32_kept,
    )


LayerSpec = CrossLayerSpec | DoubleLayerSpec | SingleLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec
