"""Layers of each kind, stacks of them, and the stacks of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dit.models.layer_spec.parts import (
    PER_BLOCK,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerTextSpec,
    ModulationSpec,
    PerBlockModulation,
    SharedModulation,
    TableModulation,
    WholeLayerModulation,
)
from dit.models.layer_spec.shapes import AttentionShape, RowKind


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

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        width = self.cross_attention.width
        found = (AttentionShape(width=self.attention.width),)
        found += (AttentionShape(width=width, keys=RowKind.TEXT),)
        if self.image_rows is None:
            return found
        return *found, AttentionShape(width=width, keys=RowKind.SAMPLES, times=self.image_rows)

    @property
    def exchanges(self) -> int:
        return 2 + self.feed_forward.exchanges


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

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        found = (_among(self.attention, RowKind.JOINT),)
        own = (_among(self.attention, RowKind.LATENTS),)
        return found + own if self.second_attention else found

    @property
    def exchanges(self) -> int:
        return 1 + self.second_attention + self.feed_forward.exchanges


@dataclass(frozen=True, kw_only=True)
class SingleLayerSpec:
    """Attention and feed-forward side by side, over latents and text in one row (FLUX)."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    modulation: WholeLayerModulation = PER_BLOCK
    fused: bool = False
    """Whether the first matrix is one linear in Diffusers (FLUX.2), with one adapter, too."""

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        return (_among(self.attention, RowKind.JOINT),)

    @property
    def exchanges(self) -> int:
        return self.feed_forward.exchanges


@dataclass(frozen=True, kw_only=True)
class SequentialLayerSpec:
    """Attention, then feed-forward, over latents, text, or both in one row.

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
    """Whether attention and feed-forward stand side by side; norms have no weights."""
    weighted: bool = True
    """Whether norms are RMSNorms with weights; else LayerNorms without (HiDream)."""
    eps: float = 1e-5  # of those with weights
    centred: bool = False
    """Whether these weights are stored less 1."""
    after: bool = True
    """Whether what attention and feed-forward make is normed, too (sandwich)."""
    shifted: bool = False
    tanh: bool = True
    """Whether gates are the tanh of what the modulation makes."""
    layer_text: LayerTextSpec | None = None
    """Text that is each layer's own, behind the other text."""
    idle: bool = False
    """Whether no sample has such rows, so that nothing is computed."""

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        return (_among(self.attention, self.rows),)

    @property
    def exchanges(self) -> int:
        return 1 + self.feed_forward.exchanges


def _among(attention: AttentionSpec, rows: RowKind) -> AttentionShape:
    return AttentionShape(width=attention.width, queries=rows, keys=rows)


LayerSpec = CrossLayerSpec | DoubleLayerSpec | SingleLayerSpec | SequentialLayerSpec
"""Each says who attends to whom (`attentions`), and how often tensor ranks gather tokens, compute
with split matrices and scatter them (`exchanges`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """The layers of a network, and how many tokens they see of a sample."""

    stacks: tuple[StackSpec, ...]
    trains_conditioner: bool = False
    """Whether the first stage has a conditioner, which makes text of captions before they are
    filled up (Anima)."""
    text_layers: str = ""
    """How the names of weights of layers over text alone begin, which are computed again in the
    backward pass, on the first stage."""
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
        """Exchanges between tensor ranks in a pass, of all layers (see `LayerSpec`)."""
        return sum(stack.count * stack.layer.exchanges for stack in self.stacks)

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each pays for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.attentions)
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
