"""Layers of each kind, and stacks of them."""

from __future__ import annotations

from dataclasses import dataclass

from dit.models.layer_spec.kept import (
    AFFINE,
    BY_TABLE,
    EXCHANGED,
    EXCHANGED_ACROSS_HEADS,
    JOINT,
    JOINT_WITHOUT_NORM,
    MODULATED,
    NOTHING,
    SECOND,
    SELF,
    SELF_ACROSS_HEADS,
    SINGLE,
    KeptBy,
    of_feed_forward,
)
from dit.models.layer_spec.modulation import (
    PER_BLOCK,
    ModulationSpec,
    TableModulation,
    WholeLayerModulation,
)
from dit.models.layer_spec.parts import AttentionSpec, FeedForwardSpec, QkNorm, whole_bias
from dit.models.layer_spec.shapes import (
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
        across = self.attention.norm is QkNorm.ACROSS_HEADS
        part = BY_TABLE if isinstance(self.modulation, TableModulation) else MODULATED
        kept = (SELF_ACROSS_HEADS if across else SELF) + part + part
        kept += part if self.gated_cross else AFFINE
        rows = RowKind.LATENTS
        total = _self_attention(self.attention, self.feed_forward, rows, exchanges=2, kept=kept)
        total += self.attention.cost() + self.cross_attention.cross_cost(self.text_width)
        if self.image_rows is not None:
            total += self.cross_attention.image_cost(self.text_width, self.image_rows)
        total += self.feed_forward.cost()
        total += self.modulation.cost(width, 9 if self.gated_cross else 6)
        affine = () if self.gated_cross else (WeightShape(numbers=2 * width),)
        exchanged = EXCHANGED_ACROSS_HEADS if across else EXCHANGED
        return total + Cost(weights=affine, kept_exchanged=exchanged)


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
        joint = JOINT_WITHOUT_NORM if attention.norm is QkNorm.NONE else JOINT
        kept = joint + MODULATED + MODULATED
        total = _self_attention(attention, feed_forward, RowKind.JOINT, exchanges=2, kept=kept)
        total += attention.cost() + feed_forward.cost()
        total += self.modulation.cost(width, 9 if self.second_attention else 6)
        if self.second_attention:
            own = AttentionShape(width=width)
            total += attention.cost()
            total += Cost(attentions=(own,), exchanges=1, kept=SECOND)
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
        kept, rows = SINGLE + MODULATED, RowKind.JOINT
        total = _self_attention(self.attention, self.feed_forward, rows, exchanges=1, kept=kept)
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
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
    rows: RowKind,
    *,
    exchanges: int,
    kept: KeptBy,
) -> Cost:
    """Who attends to whom in a layer, and what its backward pass keeps, with its feed-forward."""
    kept += of_feed_forward(feed_forward.hidden, attention.width)
    width = attention.width
    return Cost(
        attentions=(AttentionShape(width=width, queries=rows, keys=rows),),
        exchanges=exchanges,
        kept=kept,
        kept_of_text=kept if RowKind.TEXT in rows else NOTHING,
    )


LayerSpec = CrossLayerSpec | DoubleLayerSpec | SingleLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec
