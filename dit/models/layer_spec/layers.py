"""Layers of each kind, stacks of them, and the stacks of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dit.models.layer_spec.parts import (
    PER_BLOCK,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerTextSpec,
    ModulationSpec,
    PerBlockModulation,
    QkNorm,
    SharedModulation,
    TableModulation,
    WholeLayerModulation,
)
from dit.models.layer_spec.shapes import (
    AFFINE,
    BY_TABLE,
    CENTRED,
    CENTRED_HEADS,
    CROSS,
    CROSS_ACROSS_HEADS,
    EXCHANGED,
    EXCHANGED_ACROSS_HEADS,
    FLOAT32_ROWS,
    GROUPED,
    JOINT,
    JOINT_ACROSS_HEADS,
    JOINT_WITHOUT_NORM,
    MODULATED,
    NOT_AFTER,
    NOTHING,
    OF_CUBES,
    OF_IMAGE,
    OUTPUT_GATE,
    SECOND,
    SELF,
    SELF_ACROSS_HEADS,
    SEQUENTIAL,
    SINGLE,
    TWISTED,
    UNCHANGED,
    AttentionShape,
    KeptBy,
    LayerNeeds,
    RowKind,
)


@dataclass(frozen=True, kw_only=True)
class CrossLayerSpec:
    """Self-attention, cross-attention to text and feed-forward, in turn (Cosmos, Wan, LTX)."""

    attention: AttentionSpec
    cross_attention: AttentionSpec
    text_width: int  # of the text that the layer attends to
    feed_forward: FeedForwardSpec
    modulation: ModulationSpec
    gated_cross: bool = True  # False: without modulation or gate (Wan, LTX)
    cross_norm: bool = True
    """Whether an affine LayerNorm stands before cross-attention without a gate (Wan: yes)."""
    learned_positions: bool = False  # whether they are added before every layer (Cosmos)
    image_rows: int | None = None
    """Rows of an image encoder in each sample, of the width of the text. Cross-attention attends to
    them with keys, values and a softmax of their own, and adds what it finds (Wan 2.1); None: it
    attends to text alone."""

    @cached_property  # a planner asks for it many times
    def needs(self) -> LayerNeeds:
        # Two exchanges, because the third is that of cross-attention.
        across = self.attention.norm is QkNorm.ACROSS_HEADS
        part = BY_TABLE if isinstance(self.modulation, TableModulation) else MODULATED
        kept = (SELF_ACROSS_HEADS if across else SELF) + part + part
        kept += part if self.gated_cross else AFFINE if self.cross_norm else UNCHANGED
        rows = RowKind.LATENTS
        total = _self_attention(self.attention, self.feed_forward, rows, exchanges=1, kept=kept)
        exchanged = EXCHANGED_ACROSS_HEADS if across else EXCHANGED
        return total + self._of_cross_attention + LayerNeeds(kept_exchanged=exchanged)

    @property
    def _of_cross_attention(self) -> LayerNeeds:
        cross = self.cross_attention
        kept = CROSS_ACROSS_HEADS if cross.norm is QkNorm.ACROSS_HEADS else CROSS
        total = LayerNeeds(
            attentions=(AttentionShape(width=cross.width, keys=RowKind.TEXT),),
            exchanges=1,
            kept=kept,
            kept_of_text=kept,
        )
        if self.image_rows is None:
            return total
        image = AttentionShape(width=cross.width, keys=RowKind.SAMPLES, times=self.image_rows)
        return total + LayerNeeds(attentions=(image,), kept=OF_IMAGE)


@dataclass(frozen=True, kw_only=True)
class DoubleLayerSpec:
    """Latents and text with separate weights, and attention over both together.

    FLUX, Qwen-Image, HunyuanVideo and SD3 have such layers.
    """

    attention: AttentionSpec  # of either row
    feed_forward: FeedForwardSpec | ExpertsSpec  # of either row
    text_feed_forward: FeedForwardSpec | None = None
    """That of the text, where it is another one (HiDream)."""
    modulation: WholeLayerModulation = PER_BLOCK
    text_is_read: bool = True
    """Whether anything reads the text after the last layer. Where nothing does, the last layer does
    not compute it, and `DoubleStreamLayer.unused` names the weights that get no gradient."""
    updates_text: bool = True
    """Whether there are weights that compute the text anew (not in the last layer of SD3)."""
    second_attention: bool = False
    """Whether latents also attend to each other, apart from the text (SD3.5 medium)."""
    one_modulation: bool = False
    """Whether one linear makes scales, shifts and gates of both rows (HiDream)."""
    layer_text: LayerTextSpec | None = None
    """Text that is each layer's own, behind the other text."""

    @property
    def of_text(self) -> FeedForwardSpec:
        """The feed-forward of the text."""
        own = self.text_feed_forward or self.feed_forward
        assert isinstance(own, FeedForwardSpec), "experts of text have no layer here"
        return own

    @cached_property
    def needs(self) -> LayerNeeds:
        """What a layer attends to, exchanges and keeps, with or without an update of its text."""
        attention, width = self.attention, self.attention.width
        kept = _JOINT[attention.norm] + MODULATED + MODULATED
        total = _self_attention(attention, self.feed_forward, RowKind.JOINT, exchanges=1, kept=kept)
        if self.text_feed_forward is not None:
            total = replace(total, kept_of_text=kept + self.of_text.kept)
        if self.second_attention:
            own = AttentionShape(width=width)
            total += LayerNeeds(attentions=(own,), exchanges=1, kept=SECOND)
        return total


@dataclass(frozen=True, kw_only=True)
class SingleLayerSpec:
    """Attention and feed-forward side by side, over latents and text in one row (FLUX)."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    modulation: WholeLayerModulation = PER_BLOCK
    fused: bool = False
    """Whether the first matrix is one linear in Diffusers (FLUX.2), with one adapter, too."""

    @cached_property
    def needs(self) -> LayerNeeds:
        kept, rows = SINGLE + MODULATED, RowKind.JOINT
        return _self_attention(self.attention, self.feed_forward, rows, exchanges=0, kept=kept)


@dataclass(frozen=True, kw_only=True)
class SequentialLayerSpec:
    """Attention, then feed-forward, over latents, text, or both in one row (Lumina, ERNIE).

    y = norm_1(h) * (1 + scale) + shift;    h = h + gate * after_1(attention(y))
    y = norm_2(h) * (1 + scale) + shift;    h = h + gate * after_2(feed_forward(y))

    With `parallel` both read the first y, and h = h + gate * (attention(y) + feed_forward(y)).
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    rows: RowKind = RowKind.JOINT
    modulation: PerBlockModulation | SharedModulation | TableModulation | None = PER_BLOCK
    """None: without scales, shifts and gates, as in refiners of text."""
    parallel: bool = False
    """Whether attention and feed-forward stand side by side (FLUX.3); norms have no weights."""
    weighted: bool = True
    """Whether norms are RMSNorms with weights; else LayerNorms without (HiDream)."""
    eps: float = 1e-5  # of those with weights
    centred: bool = False
    """Whether these weights are stored less 1 (Krea 2)."""
    after: bool = True
    """Whether what attention and feed-forward make is normed, too (sandwich)."""
    shifted: bool = False
    tanh: bool = True
    """Whether gates are the tanh of what the modulation makes."""
    layer_text: LayerTextSpec | None = None
    """Text that is each layer's own, behind the other text."""
    idle: bool = False
    """Whether no sample has such rows, so that nothing is computed."""

    @cached_property
    def needs(self) -> LayerNeeds:
        attention = self.attention
        kept = SEQUENTIAL if attention.key_heads == attention.heads else GROUPED
        more = (
            (NOT_AFTER, not self.after),
            (TWISTED, attention.twisted),
            (CENTRED, self.centred),
            (CENTRED_HEADS, attention.centred),
            (OUTPUT_GATE, attention.output_gate),
            (FLOAT32_ROWS, isinstance(self.modulation, TableModulation)),
        )
        kept = sum((one for one, holds in more if holds), kept)
        if not self.weighted:
            across = attention.norm is QkNorm.ACROSS_HEADS
            kept = (SELF_ACROSS_HEADS if across else SELF) + MODULATED
            kept += NOTHING if self.parallel else MODULATED
        made = _self_attention(attention, self.feed_forward, self.rows, exchanges=1, kept=kept)
        if self.rows is RowKind.TEXT or self.idle:  # references: all latents of a pack that has any
            made = replace(made, kept=NOTHING)
        return made


_JOINT = {
    QkNorm.NONE: JOINT_WITHOUT_NORM,
    QkNorm.PER_HEAD: JOINT,
    QkNorm.ACROSS_HEADS: JOINT_ACROSS_HEADS,
}


def _self_attention(
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec | ExpertsSpec,
    rows: RowKind,
    *,
    exchanges: int,
    kept: KeptBy,
) -> LayerNeeds:
    """What self-attention and `feed_forward` need; `exchanges` are the attention's."""
    kept += feed_forward.kept
    sparse = attention.sparse_pairs is not None
    return LayerNeeds(
        attentions=(AttentionShape(width=attention.width, queries=rows, keys=rows),),
        exchanges=exchanges + feed_forward.exchanges,
        kept=kept + OF_CUBES if sparse else kept,
        kept_of_text=kept if RowKind.TEXT in rows else NOTHING,
        cube_heads=attention.heads if sparse else 0,
    )


LayerSpec = CrossLayerSpec | DoubleLayerSpec | SingleLayerSpec | SequentialLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """The layers of a network, and the number of tokens that they see of a sample."""

    stacks: tuple[StackSpec, ...]
    conditioner_kept: KeptBy = NOTHING
    """What the backward pass needs of each caption token in the conditioner (Anima), which makes
    text of captions before they are filled up, for each unit of width."""
    text_layers: str = ""
    """How the names of weights of layers over text alone begin, which are computed again in the
    backward pass, on the first stage (Krea 2)."""
    text_layers_kept: int = 0
    """Numbers of each text token that they keep for it."""
    text_tokens: int | None = None
    """Text is filled up to this many tokens a sample; None leaves it as long as it is."""
    attended_multiple: int = 1
    """Text and latents of a sample are filled up to a multiple of so many tokens, with attention
    to all of them."""
    image_rows: int = 0
    """Rows of an image encoder in each sample: of its text inputs' rows, but no text tokens."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def exchanges(self) -> int:
        """Number of exchanges between tensor ranks in a pass (see `LayerNeeds.exchanges`)."""
        return sum(stack.count * stack.layer.needs.exchanges for stack in self.stacks)

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each costs for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.needs.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Text tokens that layers see, for samples with so many rows of all text inputs."""
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        if self.image_rows:
            lengths = [length - self.image_rows for length in lengths]
        return self.filled(lengths)

    def filled(self, lengths: Sequence[int]) -> Sequence[int]:
        """Tokens that layers see, for latents or texts of these `lengths`."""
        multiple = self.attended_multiple
        if multiple == 1:
            return lengths
        return [-(-length // multiple) * multiple for length in lengths]
