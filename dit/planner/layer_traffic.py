"""What a layer moves through the memory of one device, beside its products and attention kernels.

A unit is the latent tokens of the device x width x 2 bytes: one read or one write of the hidden
state in bfloat16. Every number stands for an operation that `benchmarks/count_traffic.py` counts,
and tests hold the sums against that counter, for all kinds of layers:

    eager   each operation of torch reads its inputs and writes its output once; what is computed
            in float32 counts twice, and the way into and out of it 3
    fused   loads and stores of the kernels of `dit/models/kernels`, as its `traffic` has them

Left out is what has a row for each sample (modulation before it is spread) and the places of
tokens, below 1%, and the copies with which context ranks arrange what they exchange.
"""

# D model width, F numbers inside a feed-forward, K head width, N samples of the pack

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    CrossLayerSpec,
    DoubleLayerSpec,
    FeedForwardSpec,
    LayerSpec,
    QkNorm,
    SingleLayerSpec,
    TableModulation,
)

CHUNK, HEADS = 32, 16
"""Tokens and heads of a fused kernel's programs (`row_chunks.CHUNK`, `rotated_heads.HEADS`)."""

KERNELS = {False: 190, True: 90}
"""Of a layer in a step, eager or fused: the 144 or 43 operations that the counter finds in DiT-XL,
three for each of its 13 products, and 8 of attention."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Units of the two passes."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Moved:
        return Moved(self.forward * factor, self.backward * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """What the units of a layer depend on beside its sizes."""

    fused: bool
    text: float
    """Text tokens for each latent token."""
    samples: float
    """Of a pack."""
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    by_heads: bool = True
    """Whether context ranks exchange heads (a2a), not keys and values."""


def layer_units(layer: LayerSpec, load: LayerLoad) -> Moved:
    """Of one layer on one tensor rank."""
    match layer:  # each gives what is inside and outside of the matrices that tensor ranks split
        case CrossLayerSpec():
            inside, outside = _cross_layer(layer, load)
        case DoubleLayerSpec():
            inside, outside = _double_layer(layer, load)
        case SingleLayerSpec():
            inside, outside = _single_layer(layer, load)
    whole = load.tensor if load.sequence_parallel else 1
    return inside.times(1 / load.tensor) + outside.times(1 / whole)


def head_units(width: int, load: LayerLoad) -> Moved:
    """Of the modulation after the last layer."""
    return _modulation(width, load, norms=1, wide=False)


def _cross_layer(layer: CrossLayerSpec, load: LayerLoad) -> tuple[Moved, Moved]:
    width, attention, cross = layer.attention.width, layer.attention, layer.cross_attention
    inside = _queries_and_keys(attention, load, others=1) + _biases(attention, load, made=3)
    inside += _cross_attention(cross, load) + _feed_forward(layer.feed_forward, load)
    if load.context > 1:
        inside += _exchange(load)
    wide = isinstance(layer.modulation, TableModulation)
    outside = (
        _bias(attention.bias, load) + _bias(cross.bias, load) + _bias(layer.feed_forward.bias, load)
    )
    if layer.gated_cross:
        outside += _modulation(width, load, norms=1, both=2, gates=1, wide=wide)
    else:
        outside += _modulation(width, load, norms=2, gates=2, wide=wide)
        # LayerNorm with weights, and the sum; backward, the gradients of both meet.
        outside += Moved(2 + 3, 3 + 3)
    if layer.learned_positions:
        outside += Moved(3, 3)  # added; their gradient is the sum over layers
    return inside, outside


def _exchange(load: LayerLoad) -> Moved:
    """Copies around the exchange of context ranks, of layers with one row of tokens.

    By heads, one copy of queries, keys and values by rank (6), and one of the output (2); in the
    order of the pack they are already. Else keys and values side by side (4), and those of all
    ranks in order (4 each). Backward the same, but for the sides, and gradients side by side first.
    """
    if load.by_heads:
        return Moved(6 + 2, 2 + 6 + 6)
    return Moved(4 + 4 * load.context, (4 + 4) * load.context)


def _double_layer(layer: DoubleLayerSpec, load: LayerLoad) -> tuple[Moved, Moved]:
    width, attention = layer.attention.width, layer.attention
    inside = _queries_and_keys(attention, load, others=1) + _biases(attention, load, made=3)
    inside += _feed_forward(layer.feed_forward, load)
    # Queries, keys and values of both rows: joined (6), side by side (6), in joint order (6), and
    # the output back (2); backward, the halves of the output are joined as well (2).
    inside += Moved(6 + 6 + 6 + 2, 6 + 6 + 2 + 2)
    wide = isinstance(layer.modulation, TableModulation)
    outside = _modulation(width, load, norms=1, both=1, gates=1, wide=wide)
    outside += _bias(attention.bias, load) + _bias(layer.feed_forward.bias, load)
    # A last layer that does not update its text moves less: one of many, not told apart here.
    inside, outside = inside.times(1 + load.text), outside.times(1 + load.text)
    if layer.second_attention:
        inside += _queries_and_keys(attention, load, others=1) + _biases(attention, load, made=3)
        outside += _modulation(width, load, norms=1, gates=1, wide=wide) + _bias(
            attention.bias, load
        )
    return inside, outside


def _single_layer(layer: SingleLayerSpec, load: LayerLoad) -> tuple[Moved, Moved]:
    width, attention, inner = layer.attention.width, layer.attention, layer.feed_forward
    made = inner.hidden * inner.activation.inputs / width
    inside = _queries_and_keys(attention, load, others=1 + made)
    inside += _biases(attention, load, made=3 + made) + _activation(inner)
    # Attention and hidden units are laid side by side.
    inside += Moved(2 * (1 + inner.hidden / width), 0)
    wide = isinstance(layer.modulation, TableModulation)
    outside = _modulation(width, load, norms=1, gates=1, wide=wide) + _bias(attention.bias, load)
    return inside.times(1 + load.text), outside.times(1 + load.text)


def _modulation(
    width: int, load: LayerLoad, *, norms: int, both: int = 0, gates: int = 0, wide: bool
) -> Moved:
    """So many norms with scale and shift, gated sums with such a norm after them, gated sums.

    `wide`: scale, shift and gate are float32.
    """
    if load.fused:
        return _fused_modulation(norms=norms, both=both, gates=gates, row=(1 + wide) / CHUNK)
    # The sum over the tokens of a sample multiplies by a mask: made of truth values, then numbers.
    mask = (5 if wide else 3) * load.samples / width
    if wide:
        norm = Moved(3 + 2 * 2 + 4 + 8 + 3, 3 + 20 + 2 * (2 + mask) + 6 + 3 + 3)
        gate = Moved(2 * 3 + 2 + 8 + 3, 3 + 20 + 2 + mask + 2 * 3)
    else:
        # Forward: rows spread (1 each), LayerNorm (2), addcmul (4). Backward: addcmul (two times a
        # scaling by 1 and a product: 10), sums over samples (1 each), LayerNorm (3), the residual.
        norm = Moved(2 + 2 + 4, 10 + 2 * (1 + mask) + 3 + 3)
        gate = Moved(1 + 4, 10 + 1 + mask)
    return norm.times(norms + both) + gate.times(gates + both)


def _fused_modulation(*, norms: int, both: int, gates: int, row: float) -> Moved:
    """`row` are the units of one kind of rows, of which every program reads its own."""
    part = 2 * 4 / 2 / CHUNK  # a program's sum in float32, written and read again
    norm = Moved(2 + 2 * row, 4 + row + 2 * part)
    norm_and_gate = Moved(4 + 3 * row, 6 + 2 * row + 3 * part)
    gate = Moved(3 + row, 3 + row + part)
    return norm.times(norms) + norm_and_gate.times(both) + gate.times(gates)


def _queries_and_keys(attention: AttentionSpec, load: LayerLoad, *, others: float) -> Moved:
    """Norm and rotation; `others` are the widths beside them in the product, over D."""
    angles = attention.head_width / attention.width
    read = 2 * angles * ceil(attention.heads / HEADS)
    if load.fused and attention.norm is QkNorm.PER_HEAD:
        return Moved(4 + read, 6 + 2 * others + read)
    if load.fused and attention.norm is QkNorm.ACROSS_HEADS:
        # Queries and keys, one after the other, each read angles.
        each = _across_heads() + Moved(read, read)
        return each.times(2) + Moved(0, 2 * others)
    # Into float32 (3), cosines (4), sines on both halves (6), and back (3).
    rotation = Moved(16 + 4 * angles, 16 + 4 * angles)
    each = rotation + _head_norm(attention, copied=True)
    # Gradients of queries, keys and what is beside them are joined.
    return each.times(2) + Moved(0, 2 * (2 + others))


def _head_norm(attention: AttentionSpec, *, copied: bool) -> Moved:
    """Of queries or keys; `copied` where they lie among others."""
    match attention.norm:
        case QkNorm.NONE:
            return Moved()
        case QkNorm.PER_HEAD:
            return Moved(2 + 2 * copied, 3)
        case QkNorm.ACROSS_HEADS:
            # In float32: squares (4) and their sum (2), times rms (4), times weight (4).
            # Backward 3 conversions and sums more, each operation by autograd's formula.
            return Moved(3 + 4 + 2 + 8 + 3, 3 + 30 + 4 + 4 + 6 + 3)


def _across_heads() -> Moved:
    """Fused, of queries or keys: the sums read them before the kernel that normalises does."""
    return Moved(1 + 2, 2 + 3)


def _cross_attention(cross: AttentionSpec, load: LayerLoad) -> Moved:
    if load.fused and cross.norm is QkNorm.ACROSS_HEADS:
        # Gradients of values are written beside those of keys.
        text = _across_heads() + Moved(0, 2) + _biases(cross, load, made=2)
        return _across_heads() + _biases(cross, load, made=1) + text.times(load.text)
    queries, keys = (_head_norm(cross, copied=copied) for copied in (False, True))
    # Gradients of keys and values are joined.
    text = keys + Moved(0, 4) + _biases(cross, load, made=2)
    return queries + _biases(cross, load, made=1) + text.times(load.text)


def _feed_forward(spec: FeedForwardSpec, load: LayerLoad) -> Moved:
    made = spec.hidden * spec.activation.inputs / spec.width
    return _activation(spec) + _bias(spec.bias, load).times(made)


def _activation(spec: FeedForwardSpec) -> Moved:
    inner = spec.hidden / spec.width
    if spec.activation is Activation.SWIGLU:
        # silu (2) and a product (3); backward both factors (6), silu (3), and both gradients are
        # written side by side (4).
        return Moved(5, 13).times(inner)
    return Moved(2, 3).times(inner)


def _biases(attention: AttentionSpec, load: LayerLoad, *, made: float) -> Moved:
    """Of a product with so many outputs for each number of the width."""
    return _bias(attention.bias, load).times(made)


def _bias(bias: bool, load: LayerLoad) -> Moved:
    """Added to D outputs, on one tensor rank by the product; backward, the sum over tokens."""
    return Moved(2 * (load.tensor > 1), 1) if bias else Moved()
