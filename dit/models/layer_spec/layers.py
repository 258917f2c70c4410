"""Layers of each kind, stacks of them, and networks: what comes before and after the stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dit.models.layer_spec.parts import (
    PER_BLOCK,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerTextSpec,
    ModulationSpec,
    PerBlockModulation,
    QkNorm,
    TableModulation,
    WholeLayerModulation,
    whole_bias,
)
from dit.models.layer_spec.shapes import (
    AFFINE,
    BY_TABLE,
    EXCHANGED,
    EXCHANGED_ACROSS_HEADS,
    GROUPED,
    JOINT,
    JOINT_ACROSS_HEADS,
    JOINT_WITHOUT_NORM,
    MODULATED,
    NOTHING,
    SECOND,
    SELF,
    SELF_ACROSS_HEADS,
    SEQUENTIAL,
    SINGLE,
    UNCHANGED,
    AttentionShape,
    Cost,
    KeptBy,
    LinearShape,
    Multiplications,
    RowKind,
    WeightShape,
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
    def cost(self) -> Cost:
        width = self.attention.width
        # Two exchanges, because the third is that of cross-attention.
        across = self.attention.norm is QkNorm.ACROSS_HEADS
        part = BY_TABLE if isinstance(self.modulation, TableModulation) else MODULATED
        kept = (SELF_ACROSS_HEADS if across else SELF) + part + part
        kept += part if self.gated_cross else AFFINE if self.cross_norm else UNCHANGED
        rows = RowKind.LATENTS
        total = _self_attention(self.attention, self.feed_forward, rows, exchanges=1, kept=kept)
        total += self.attention.cost() + self.cross_attention.cross_cost(self.text_width)
        if self.image_rows is not None:
            total += self.cross_attention.image_cost(self.text_width, self.image_rows)
        total += self.feed_forward.cost()
        total += self.modulation.cost(width, 9 if self.gated_cross else 6)
        has_weights = self.cross_norm and not self.gated_cross
        affine = (WeightShape(numbers=2 * width),) if has_weights else ()
        exchanged = EXCHANGED_ACROSS_HEADS if across else EXCHANGED
        return total + Cost(weights=affine, kept_exchanged=exchanged)


@dataclass(frozen=True, kw_only=True)
class DoubleLayerSpec:
    """Latents and text with weights of their own, and attention over both together.

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
    def cost(self) -> Cost:
        """Of a layer whose text is read, or which does not update it."""
        attention, feed_forward, width = self.attention, self.feed_forward, self.attention.width
        joint = _JOINT[attention.norm]
        kept = joint + MODULATED + MODULATED
        total = _self_attention(attention, feed_forward, RowKind.JOINT, exchanges=1, kept=kept)
        if self.text_feed_forward is not None:
            total = replace(total, kept_of_text=kept + self.of_text.kept)
        total += attention.cost() + feed_forward.cost()
        total += self.modulation.cost(width, 9 if self.second_attention else 6)
        if self.layer_text is not None:
            total += self.layer_text.cost(width)
        if self.second_attention:
            own = AttentionShape(width=width)
            total += attention.cost()
            total += Cost(attentions=(own,), exchanges=1, kept=SECOND)
        total += attention.cost(RowKind.TEXT, output=self.updates_text)
        if not self.updates_text:
            return total + self.modulation.cost(width, 2)
        return total + self.of_text.cost(RowKind.TEXT) + self.modulation.cost(width, 6)


@dataclass(frozen=True, kw_only=True)
class SingleLayerSpec:
    """Attention and feed-forward side by side, over latents and text in one row (FLUX)."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    modulation: WholeLayerModulation = PER_BLOCK
    fused: bool = False
    """Whether the first matrix is one linear in Diffusers (FLUX.2), with one adapter, too."""

    @cached_property
    def cost(self) -> Cost:
        kept, rows = SINGLE + MODULATED, RowKind.JOINT
        total = _self_attention(self.attention, self.feed_forward, rows, exchanges=0, kept=kept)
        width, bias, inner = self.attention.width, self.attention.bias, self.feed_forward
        made = 3 * width + inner.hidden * inner.activation.inputs
        rows: Any = {"rows": RowKind.JOINT, "split": True}
        parts = 1 if self.fused else 4
        linears = (
            LinearShape(inputs=width, outputs=made, bias=bias, parts=parts, **rows),
            LinearShape(inputs=width + inner.hidden, outputs=width, **rows),
        )
        total += Cost(linears=linears) + whole_bias(width, bias) + self.attention.norms
        return total + self.modulation.cost(width, 3)


@dataclass(frozen=True, kw_only=True)
class SequentialLayerSpec:
    """Attention, then feed-forward, over latents, text, or both in one row (Lumina, Z-Image).

    y = norm_1(h) * (1 + scale) + shift;    h = h + gate * after_1(attention(y))
    y = norm_2(h) * (1 + scale) + shift;    h = h + gate * after_2(feed_forward(y))
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    rows: RowKind = RowKind.JOINT
    modulation: PerBlockModulation | None = PER_BLOCK
    """None: without scales, shifts and gates, as in refiners of text."""
    weighted: bool = True
    """Whether norms are RMSNorms with weights; else LayerNorms without (HiDream)."""
    eps: float = 1e-5  # of those with weights
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
    def cost(self) -> Cost:
        attention, width = self.attention, self.attention.width
        kept = SEQUENTIAL if attention.key_heads == attention.heads else GROUPED
        if not self.weighted:
            kept = SELF_ACROSS_HEADS + MODULATED + MODULATED
        made = _self_attention(attention, self.feed_forward, self.rows, exchanges=1, kept=kept)
        if self.rows is RowKind.TEXT or self.idle:  # references: all latents of a pack that has any
            made = replace(made, kept=NOTHING)
        total = made + attention.cost(self.rows) + self.feed_forward.cost(self.rows)
        norms = (4 if self.after else 2) if self.weighted else 0
        total += Cost(weights=(WeightShape(numbers=width),) * norms)
        if self.layer_text is not None:
            total += self.layer_text.cost(width)
        if self.modulation is None:
            return total
        told = self.modulation.cost(width, 6 if self.shifted else 4)
        if self.rows is RowKind.REFERENCES:
            told = replace(
                told, linears=tuple(replace(one, rows=self.rows) for one in told.linears)
            )
        return total + told


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
) -> Cost:
    """Who attends to whom in a layer, and what its backward pass keeps, with its feed-forward.

    `exchanges` are those beside the feed-forward's.
    """
    kept += feed_forward.kept
    seen = 1 if attention.sparse_pairs is None else attention.sparse_pairs
    return Cost(
        attentions=(AttentionShape(width=attention.width, queries=rows, keys=rows, seen=seen),),
        exchanges=exchanges + feed_forward.exchanges,
        kept=kept,
        kept_of_text=kept if RowKind.TEXT in rows else NOTHING,
    )


LayerSpec = CrossLayerSpec | DoubleLayerSpec | SingleLayerSpec | SequentialLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """A network: what comes before its layers, the layers, and what comes after them."""

    before: Cost
    stacks: tuple[StackSpec, ...]
    after: Cost
    conditioner: Cost = field(default_factory=Cost)
    """What makes text of captions before they are filled up, of one row for each of theirs; it is
    the attribute of the network that has this name (Anima)."""
    text_tokens: int | None = None
    """Text is filled up to this many tokens a sample; None leaves it as long as it is."""
    attended_multiple: int = 1
    """Text and latents of a sample are filled up to a multiple of so many tokens, with attention
    to all of them."""
    image_rows: int = 0
    """Rows of an image encoder in each sample: of its text inputs' rows, but no text tokens. The
    description counts what they cost with the sample."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def ends(self) -> tuple[Cost, Cost]:
        """All that comes before the stacks, and all that comes after them."""
        return self.before + self.conditioner, self.after

    @property
    def exchanges(self) -> int:
        """Those of all layers."""
        return sum(stack.count * stack.layer.cost.exchanges for stack in self.stacks)

    @cached_property
    def multiplications(self) -> Multiplications:
        """Without those of a conditioner, which sees other rows."""
        total = self.before.multiplications + self.after.multiplications
        for stack in self.stacks:
            total += stack.layer.cost.multiplications.times(stack.count)
        return total

    @cached_property
    def in_attention(self) -> Multiplications:
        """Those of `multiplications` that attention makes."""
        total = Multiplications()
        for stack in self.stacks:
            total += stack.layer.cost.in_attention.times(stack.count)
        return total

    def in_layers(self, first: int, last: int) -> Cost:
        """What layers `first` to `last` consist of, counted from 0 over all stacks."""
        layers = [stack.layer.cost for stack in self.stacks for _ in range(stack.count)]
        return sum(layers[first : last + 1], Cost())

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each pays for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.cost.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Text tokens that the layers see, of samples with so many rows of all text inputs."""
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        if self.image_rows:
            lengths = [length - self.image_rows for length in lengths]
        return self.filled(lengths)

    def filled(self, lengths: Sequence[int]) -> Sequence[int]:
        """Tokens that the layers see, of latents or texts of so many."""
        multiple = self.attended_multiple
        if multiple == 1:
            return lengths
        return [-(-length // multiple) * multiple for length in lengths]

    def parameters(self, *, tensor: int = 1, pipeline: int = 1) -> int:
        """On the fullest rank: the first stage has what comes before the layers, the last the rest.

        Each stage has as many layers; where they are of several kinds, its kinds are the largest.
        """
        sizes = [stack.layer.cost.parameters(tensor=tensor) for stack in self.stacks]
        each = [
            size for size, stack in zip(sizes, self.stacks, strict=True) for _ in range(stack.count)
        ]
        held = -(-len(each) // pipeline)
        layers = max(sum(each[at : at + held]) for at in range(0, len(each), held))
        ends = [one.parameters(tensor=tensor) for one in self.ends]
        return layers + (sum(ends) if pipeline == 1 else max(ends))

    def layer_matrices(self, *, tensor: int = 1) -> tuple[int, int]:
        """Numbers, and rows, of the matrices of a layer, on average over the kinds of layers."""
        each = [(s.count, s.layer.cost) for s in self.stacks]
        numbers = sum(count * cost.matrix_numbers(tensor=tensor) for count, cost in each)
        rows = sum(count * cost.matrix_rows for count, cost in each)
        return numbers // self.layers, rows // self.layers

    def adapter_numbers(self, rank: int, *, tensor: int = 1, pipeline: int = 1) -> int:
        """Of adapters of attention and MLP in all layers, on one of the pipeline stages."""
        each = [s.layer.cost.adapter_numbers(rank, tensor=tensor) * s.count for s in self.stacks]
        return -(-sum(each) // pipeline)
