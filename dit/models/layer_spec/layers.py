"""Layers of each kind, and stacks of them."""

from __future__ import annotations

from dataclasses import dataclass

from dit.models.layer_spec.modulation import (
    PER_BLOCK,
    ModulationSpec,
    WholeLayerModulation,
)
from dit.models.layer_spec.parts import AttentionSpec, FeedForwardSpec, whole_bias
from dit.models.layer_spec.shapes import (
    KEPT_SELF,
    AttentionShape,
    Cost,
    LinearShape,
    RowKind,
    WeightShape,
)


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
    modulation: WholeLayerModulation = PER_BLOCK
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
            total += Cost(attentions=(own,), exchanges=1, kept=KEPT_SELF)
        total += attention.cost(RowKind.TEXT, output=self.updates_text)
        if not self.updates_text:
            return total + self.modulation.cost(width, 2)
        return total + feed_forward.cost(RowKind.TEXT) + self.modulation.cost(width, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleLayerSpec:
    """Attention and feed-forward side by side, over latents and text in one row (FLUX)."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    modulation: WholeLayerModulation = PER_BLOCK

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
        total += Cost(linears=linears) + whole_bias(width, bias) + self.attention.norms
        return total + self.modulation.cost(width, 3)


def _self_attention(
    attention: AttentionSpec, feed_forward: FeedForwardSpec, rows: RowKind, *, exchanges: int
) -> Cost:
    """Who attends to whom in a layer, and what its backward pass keeps inside split matrices."""
    width = attention.width
    return Cost(
        attentions=(AttentionShape(width=width, queries=rows, keys=rows),),
        exchanges=exchanges,
        kept=KEPT_SELF + 2 * feed_forward.hidden / width,
        float32_inside=2 * attention.float32_kept,
    )


LayerSpec = CrossLayerSpec | DoubleLayerSpec | SingleLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec
