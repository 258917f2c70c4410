"""Descriptions of the layers that families choose from: cross, double-stream and single-stream.

Each function returns a `Cost`, and costs add up. What the backward pass needs was counted with
autograd's saved-tensor hooks on a CPU, in bfloat16 numbers for each token and unit of width. A
modulated part keeps 4 outside of its split matrices. Self-attention keeps 10 and cross-attention 5,
and selective recomputation saves 1 of them, the output. A feed-forward keeps input and output of
its activation.
"""

# D model width, F width inside a feed-forward, K head width, R rank of a modulation

from __future__ import annotations

from enum import StrEnum

from dit.models.cost import AttentionShape, Cost, LinearShape, RowKind, WeightShape

KEPT_OUTSIDE = 4
"""For each exchange of tensor ranks; sequence parallelism splits it."""
_KEPT_SELF, _KEPT_CROSS = 10, 5


class QkNormCost(StrEnum):
    """RMSNorm of queries and keys."""

    NONE = "none"
    PER_HEAD = "per_head"  # one weight [K] for all heads
    ACROSS_HEADS = "across_heads"  # weight [D], which tensor ranks share by heads


def _norms(norm: QkNormCost, *, width: int, heads: int) -> Cost:
    """Of queries and of keys."""
    match norm:
        case QkNormCost.NONE:
            return Cost()
        case QkNormCost.PER_HEAD:
            return Cost(weights=(WeightShape(numbers=width // heads),) * 2)
        case QkNormCost.ACROSS_HEADS:
            return Cost(weights=(WeightShape(numbers=width, split=True),) * 2)


def self_attention(
    *,
    width: int,
    heads: int,
    rows: RowKind = RowKind.LATENTS,
    bias: bool = False,
    norm: QkNormCost = QkNormCost.PER_HEAD,
) -> Cost:
    """Queries, keys and values of one row of tokens, and the output; not who attends to whom."""
    made = LinearShape(inputs=width, outputs=3 * width, rows=rows, bias=bias, split=True)
    out = LinearShape(inputs=width, outputs=width, rows=rows, split=True)
    return Cost(linears=(made, out)) + _bias(width, bias) + _norms(norm, width=width, heads=heads)


def cross_attention(
    *,
    width: int,
    heads: int,
    text_width: int,
    bias: bool = False,
    norm: QkNormCost = QkNormCost.PER_HEAD,
) -> Cost:
    """Queries of latents, keys and values of text."""
    linears = (
        LinearShape(inputs=width, outputs=width, bias=bias, split=True),
        LinearShape(inputs=text_width, outputs=2 * width, rows=RowKind.TEXT, bias=bias, split=True),
        LinearShape(inputs=width, outputs=width, split=True),
    )
    attention = AttentionShape(width=width, keys=RowKind.TEXT)
    shared = _bias(width, bias) + _norms(norm, width=width, heads=heads)
    return Cost(linears=linears, attentions=(attention,), exchanges=1, kept=_KEPT_CROSS) + shared


def feed_forward(
    *,
    width: int,
    hidden: int,
    rows: RowKind = RowKind.LATENTS,
    bias: bool = False,
    gated: bool = False,
) -> Cost:
    """Two linears; a gated one (SwiGLU) makes gates beside the hidden units."""
    wide = hidden * (2 if gated else 1)
    linears = (
        LinearShape(inputs=width, outputs=wide, rows=rows, bias=bias, split=True),
        LinearShape(inputs=hidden, outputs=width, rows=rows, split=True),
    )
    return Cost(linears=linears) + _bias(width, bias)


def _bias(width: int, bias: bool) -> Cost:
    """Of a matrix that is split by its inputs: every rank has the whole bias."""
    return Cost(weights=(WeightShape(numbers=width),) if bias else ())


def low_rank_modulation(*, width: int, rank: int, vectors: int) -> Cost:
    """Two linears through a low rank for `vectors` scales, shifts and gates (Cosmos)."""
    return replicated(width, rank, rows=RowKind.SAMPLES) + replicated(
        rank, vectors * width, rows=RowKind.SAMPLES
    )


def per_block_modulation(*, width: int, vectors: int, bias: bool = True) -> Cost:
    """One linear, split over tensor ranks (FLUX, Qwen-Image, HunyuanVideo)."""
    made = LinearShape(
        inputs=width, outputs=vectors * width, rows=RowKind.SAMPLES, bias=bias, split=True
    )
    return Cost(linears=(made,))


def table_modulation(*, width: int, vectors: int) -> Cost:
    """A learned row for each vector (Wan, LTX)."""
    return Cost(weights=(WeightShape(numbers=vectors * width),))


def replicated(
    inputs: int, outputs: int, *, rows: RowKind = RowKind.LATENTS, bias: bool = False
) -> Cost:
    """A matrix that every tensor rank has whole."""
    return Cost(linears=(LinearShape(inputs=inputs, outputs=outputs, rows=rows, bias=bias),))


def cross_layer(
    *, width: int, hidden: int, attention: Cost, text_attention: Cost, mlp: Cost, modulation: Cost
) -> Cost:
    """Self-attention, cross-attention to text and feed-forward, one after the other (Cosmos, Wan).

    Where cross-attention has an affine norm instead of modulation, that is part of `modulation`.
    """
    shared = Cost(
        attentions=(AttentionShape(width=width),),
        exchanges=2,  # the third is that of `text_attention`
        kept=_KEPT_SELF + 2 * hidden / width,
    )
    return attention + text_attention + mlp + modulation + shared


def double_layer(
    *,
    width: int,
    heads: int,
    hidden: int,
    norm: QkNormCost = QkNormCost.PER_HEAD,
    bias: bool = True,
) -> Cost:
    """Latents and text with weights of their own (FLUX, Qwen-Image, HunyuanVideo, SD3)."""
    total = Cost(
        attentions=(AttentionShape(width=width, queries=RowKind.JOINT, keys=RowKind.JOINT),),
        exchanges=2,
        kept=_KEPT_SELF + 2 * hidden / width,
    )
    for rows in RowKind.JOINT:
        total += self_attention(width=width, heads=heads, rows=rows, bias=bias, norm=norm)
        total += feed_forward(width=width, hidden=hidden, rows=rows, bias=bias)
        total += per_block_modulation(width=width, vectors=6)
    return total


def single_layer(
    *,
    width: int,
    heads: int,
    hidden: int,
    norm: QkNormCost = QkNormCost.PER_HEAD,
    bias: bool = True,
) -> Cost:
    """Attention and feed-forward side by side on one joint row (FLUX)."""
    made = feed_forward(width=width, hidden=hidden, rows=RowKind.JOINT, bias=bias)
    shared = Cost(
        # Both outputs are added to one row, so that they need one bias: that of attention.
        linears=made.linears,
        attentions=(AttentionShape(width=width, queries=RowKind.JOINT, keys=RowKind.JOINT),),
        exchanges=1,
        kept=_KEPT_SELF + 2 * hidden / width,
    )
    own = self_attention(width=width, heads=heads, rows=RowKind.JOINT, bias=bias, norm=norm)
    return own + shared + per_block_modulation(width=width, vectors=3)
