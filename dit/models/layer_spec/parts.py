"""Attention, feed-forward, embeddings, token refiners, modulation: sizes, choices and costs.

Modulation is how scales, shifts and gates of a layer are made of the embedding of its level.
"""

# D model width, F width inside a feed-forward, K head width, k vectors of a layer

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dit.models.layer_spec.shapes import (
    CROSS,
    CROSS_ACROSS_HEADS,
    OF_CUBES,
    OF_IMAGE,
    AttentionShape,
    Cost,
    Kept,
    KeptBy,
    LinearShape,
    RowKind,
    WeightShape,
    of_feed_forward,
)


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
    groups: int | None = None
    """Heads of keys and of values, each read by as many heads of queries; None: one for each."""
    sparse_pairs: float | None = None
    """Pairs of a query and a key for each pair of tokens, where cubes of tokens see some others in
    full, and by a gate the means of all (VSA); None: every token sees all, and there is no gate."""

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.heads if self.groups is None else self.groups

    def cost(self, rows: RowKind = RowKind.LATENTS, *, output: bool = True) -> Cost:
        """Queries, keys and values of a row of tokens, and the output; not who attends to whom."""
        made = LinearShape(
            inputs=self.width,
            outputs=self.width + 2 * self.key_heads * self.head_width,
            rows=rows,
            bias=self.bias,
            split=True,
            parts=3,
        )
        total = Cost(linears=(made,)) + self.norms
        if self.sparse_pairs is not None:
            gate = LinearShape(
                inputs=self.width, outputs=self.width, rows=rows, bias=self.bias, split=True
            )
            total += Cost(linears=(gate,), kept=OF_CUBES, cube_heads=self.heads)
        if not output:
            return total
        out = LinearShape(inputs=self.width, outputs=self.width, rows=rows, split=True)
        return total + Cost(linears=(out,)) + whole_bias(self.width, self.bias)

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
        kept = CROSS_ACROSS_HEADS if self.norm is QkNorm.ACROSS_HEADS else CROSS
        total = Cost(
            linears=linears,
            attentions=(attention,),
            exchanges=1,
            kept=kept,
            kept_of_text=kept,
        )
        return total + whole_bias(width, bias) + self.norms

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
        return Cost(linears=(made,), attentions=(attention,), kept=OF_IMAGE) + norm

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
        return Cost(linears=self.linears(rows)) + whole_bias(self.width, self.bias)

    @property
    def exchanges(self) -> int:
        return 1

    @property
    def kept(self) -> KeptBy:
        """Numbers that its backward pass needs, for each token and unit of width."""
        return of_feed_forward(self.hidden, self.width, gated=self.activation.inputs > 1)


MOST_EXPERTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Feed-forwards that a router weighs for each token, and one that all tokens take (HiDream).

    y = shared(x) + sum of p_e expert_e(x) over the `chosen` largest of p = softmax(router(x))
    """

    expert: FeedForwardSpec
    shared: FeedForwardSpec
    count: int
    chosen: int
    """Experts of a token; the others are computed, too, and weigh nothing."""

    @property
    def width(self) -> int:
        return self.expert.width

    @property
    def hidden(self) -> int:
        """Units of all of them together."""
        return self.shared.hidden + self.count * self.expert.hidden

    def cost(self, rows: RowKind = RowKind.LATENTS) -> Cost:
        total = replicated(self.expert.width, self.count, rows=rows) + self.shared.cost(rows)
        return sum((self.expert.cost(rows) for _ in range(self.count)), total)

    @property
    def exchanges(self) -> int:
        return 1 + self.count

    @property
    def kept(self) -> KeptBy:
        """With the output of each expert, which the gradient of its weight needs."""
        outputs = Kept(outside=self.count)
        total = self.shared.kept + KeptBy(fused=outputs, eager=outputs)
        return sum((self.expert.kept for _ in range(self.count)), total)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTextSpec:
    """Text of which each layer of a network sees other hidden states of its encoder (HiDream).

    Each layer projects them anew; those of the last layer are projected before all layers.
    """

    width: int
    """Of one hidden state."""
    rows: int
    """Of each sample."""
    states: tuple[int, ...]
    """Number of the hidden state of each layer of the network."""
    first: int = 0
    """Layers before those of the stack."""

    def state(self, layer: int) -> int | None:
        """Of a layer of the stack, from 0; None: of the last one of the network."""
        number = self.first + layer
        return self.states[number] if number + 1 < len(self.states) else None

    def columns(self, state: int) -> slice:
        """Where a hidden state stands among all of them, side by side."""
        return slice(state * self.width, (state + 1) * self.width)

    def cost(self, width: int) -> Cost:
        """Of the projection of a layer."""
        return replicated(self.width, width, rows=RowKind.SAMPLES, times=self.rows)


def whole_bias(width: int, bias: bool) -> Cost:
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


ALL_NOISE = 1000.0
"""What networks are told of t = 1."""
LEVEL_WAVES = 256
"""Cosines and sines of a noise level or a guidance scale; fixed in Diffusers."""


def condition_cost(
    width: int,
    *,
    pooled: int | None = None,
    guidance: bool = False,
    step_end: bool = False,
    bias: bool = True,
) -> Cost:
    """Of embeddings of level, end of a step, guidance and pooled text, two linears each."""
    one_row: dict[str, Any] = {"rows": RowKind.SAMPLES, "bias": bias}
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
    inputs: int | None = None
    """Width of what it reads; None: the model's."""
    activated: bool = True
    """Whether it reads the SiLU of it (all but Z-Image)."""

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates."""
        inputs, outputs, rows = self.inputs or width, vectors * width, RowKind.SAMPLES
        made = LinearShape(inputs=inputs, outputs=outputs, rows=rows, bias=self.bias, split=True)
        return Cost(linears=(made,))


@dataclass(frozen=True, slots=True)
class TableModulation:
    """A learned row for each scale, shift and gate, plus rows that all layers share (Wan, LTX).

    Computed in float32 whatever the type of the weights, as in Wan's published code.
    """

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates, three for each part."""
        weights = (WeightShape(numbers=vectors * width),)
        return Cost(weights=weights)


@dataclass(frozen=True, slots=True)
class ApproximatorModulation:
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


@dataclass(frozen=True, slots=True)
class SharedModulation:
    """Rows that linears make once for a whole stack, so that layers have no weights (FLUX.2)."""

    first: int
    """Row of the stack among those of all stacks, which every layer of it takes."""
    first_of_text: int = 0
    """Likewise of the text of double-stream layers."""

    def cost(self, width: int, vectors: int) -> Cost:  # noqa: ARG002
        """Of a layer; `shared_modulation_cost` is that of the linears."""
        return Cost()


def shared_modulation_cost(width: int, vectors: Iterable[int]) -> Cost:
    """Of the linears of `SharedModulations`, one for each stack, before the layers."""
    one = PerBlockModulation(bias=False)
    return sum((one.cost(width, count) for count in vectors), Cost())


PER_BLOCK = PerBlockModulation()
WholeLayerModulation = (
    PerBlockModulation | TableModulation | ApproximatorModulation | SharedModulation
)
"""One module for all parts of a layer."""
ModulationSpec = LowRankModulation | WholeLayerModulation
