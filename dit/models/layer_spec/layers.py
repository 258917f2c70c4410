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
    PerBlockModulation,
    QkNorm,
    SharedModulation,
    TableModulation,
)
from dit.models.layer_spec.shapes import (
    CENTRED,
    CENTRED_HEADS,
    FLOAT32_ROWS,
    GROUPED,
    MODULATED,
    NOT_AFTER,
    NOTHING,
    OF_CUBES,
    OUTPUT_GATE,
    SELF,
    SELF_ACROSS_HEADS,
    SEQUENTIAL,
    TWISTED,
    AttentionShape,
    KeptBy,
    LayerNeeds,
    RowKind,
)
from dit.models.layer_spec.steps import LayerSpec


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


def _self_attention(
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec | ExpertsSpec,
    rows: RowKind,
    *,
    exchanges: int,
    kept: KeptBy,
) -> LayerNeeds:
    """What self-attention and `feed_forward` need; `exchanges` are those of the first alone."""
    kept += feed_forward.kept
    sparse = attention.sparse_pairs is not None
    return LayerNeeds(
        attentions=(AttentionShape(width=attention.width, queries=rows, keys=rows),),
        exchanges=exchanges + feed_forward.exchanges,
        kept=kept + OF_CUBES if sparse else kept,
        kept_of_text=kept if RowKind.TEXT in rows else NOTHING,
        cube_heads=attention.heads if sparse else 0,
    )


AnyLayerSpec = LayerSpec | SequentialLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: AnyLayerSpec


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """The layers of a network, and how many tokens they see of a sample."""

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
        """Exchanges between tensor ranks in a pass, of all layers (see `LayerNeeds.exchanges`)."""
        return sum(stack.count * stack.layer.needs.exchanges for stack in self.stacks)

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each pays for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.needs.attentions)
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
