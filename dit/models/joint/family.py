"""Sizes, rules and layer specifications of networks with joint attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.models.family import TINY_NETWORK, InputKind, SampleInput
from dit.models.layer_spec import (
    JOINT_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    Activation,
    Attend,
    AttendAndFeed,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    LayerSpec,
    Modulation,
    PerBlockModulation,
    Port,
    QkNorm,
    RowNorm,
    StackSpec,
    WholeLayerModulation,
)

GLYPHS = "text_2"
JOINT_PARTS: Mapping[str, str] = {
    "modulate_out": "head",
    "proj_out": "head",
    "modulation": "modulation",
    "attention": "attention",
    "mlp": "mlp",
}
"""`Family.parts` of networks with double-stream layers: the parts whose gradient norms are
logged."""
ADALN_ZERO = ("*modul*.linear.weight", "*proj_out.weight")
"""`WeightRules.zero` of adaLN-Zero (arXiv:2212.09748, Sec. 3.2): each layer starts as the identity,
and the network outputs 0."""


EVEN_STEPS: Mapping[str, Any] = {"name": "flow", "sampling_levels": "even"}
"""Keys of `objective` for pipelines whose scheduler gets evenly spaced noise levels, from 1 to
1 / number of steps."""
TINY_DOUBLE_SINGLE: Mapping[str, Any] = {**TINY_NETWORK, "num_single_layers": 4}


class HasAxes(Protocol):
    """A configuration of a network whose rotary positions have several axes."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def rope_axes(self) -> Sequence[int]: ...


class HasKeyHeads(Protocol):
    """A configuration with grouped-query attention: several query heads share a key head."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def tensor_model_parallel_size(self) -> int: ...


class HasGlyphs(Protocol):
    """A configuration of a network that gets ByT5's states of words in quotation marks."""

    @property
    def glyph_embed_size(self) -> int: ...
    @property
    def glyph_hidden_size(self) -> int: ...


def even_axes(model: HasAxes) -> Rule:
    """The rule that each rotary axis has an even width, because numbers are rotated in pairs."""
    axes = list(model.rope_axes)
    return (
        all(axis >= 2 and axis % 2 == 0 for axis in axes),
        f"rope_axes={axes} must be even numbers of at least 2",
    )


def axes_fill_heads(model: HasAxes) -> Rule:
    """The rule that the rotary axes together fill the width of a head."""
    heads, axes = model.num_attention_heads, list(model.rope_axes)
    width = model.hidden_size // heads
    return (
        model.hidden_size % heads > 0 or sum(axes) == width,
        f"rope_axes={axes} must add up to {width}, the width of a head (hidden_size="
        f"{model.hidden_size} / num_attention_heads={heads}), but their sum is {sum(axes)}",
    )


def key_heads_divide(model: HasKeyHeads) -> list[Rule]:
    """The rules of grouped-query attention.

    The number of key heads must divide the number of query heads, and the number of tensor ranks
    must divide the number of key heads.
    """
    heads, keys, tp = (
        model.num_attention_heads,
        model.num_kv_heads,
        model.tensor_model_parallel_size,
    )
    allowed = [str(n) for n in range(1, keys + 1) if keys % n == 0]
    return [
        (
            heads % keys == 0,
            f"num_kv_heads={keys} must divide num_attention_heads={heads}: each key head serves"
            " equally many query heads",
        ),
        (
            keys % tp == 0,
            f"tensor_model_parallel_size={tp} must divide num_kv_heads={keys}, because key heads"
            f" are distributed over tensor ranks; choose {', '.join(allowed[:-1])}"
            f"{' or ' * (keys > 1)}{allowed[-1]}",
        ),
    ]


def heads_share_mlp(model: ModelConfig) -> Rule:
    """The rule that the number of heads divides the MLP width.

    Single-stream layers order the hidden units of the MLP by head.
    """
    heads = model.num_attention_heads
    return (
        model.ffn_hidden_size % heads == 0,
        f"the MLP width {model.ffn_hidden_size} (hidden_size * mlp_ratio) must be a multiple of"
        f" num_attention_heads={heads}, because single-stream layers divide the MLP among heads;"
        " change mlp_ratio",
    )


def attends_to_no_padding(model: ModelConfig, title: str) -> Rule:
    """The rule that captions are not padded, for networks that do not attend to padding.

    `title` is the network's name in the message.
    """
    return (
        model.text_pad_to is None,
        f"text_pad_to={model.text_pad_to} must be null: {title} does not attend to padding of"
        " captions",
    )


def learns_pictures(model: ModelConfig, title: str) -> Rule:
    """The rule that a patch has one frame, for networks of images.

    `title` is the network's name in the message.
    """
    return (
        model.patch_temporal == 1,
        f"patch_temporal={model.patch_temporal} must be 1: {title} is a network of images",
    )


def glyph_input(model: HasGlyphs, *, encoder: str) -> SampleInput:
    """The optional input `text_2`: ByT5's states of words in quotation marks."""
    optional: Any = {"required": False, "may_be_empty": True, "encoder": encoder}
    return SampleInput(name=GLYPHS, kind=InputKind.TEXT, width=model.glyph_embed_size, **optional)


@dataclass(frozen=True, kw_only=True)
class DoubleSingleConfig(ModelConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    shown_before: ClassVar[Mapping[str, str]] = {"num_single_layers": "hidden_size"}

    num_layers: int = 19
    """Number of double-stream layers, in which latents and text have separate weights, but attend
    to each other."""
    num_single_layers: int = bounded(38, most=2**14)
    """Number of single-stream layers, which come after the double-stream ones and compute latents
    and text jointly."""
    hidden_size: int = 3072
    num_attention_heads: int = 24
    """Number of attention heads."""
    crossattn_emb_size: int = 4096
    rope_axes: tuple[int, int, int] = bounded((16, 56, 56), most=2**17, least=None)
    """Widths of a head rotated by frame or reference, by row, and by column; their sum is the
    head's width."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        return [even_axes(self)]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self), heads_share_mlp(self)]

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.num_single_layers

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        return [*sizes, self.num_single_layers, self.crossattn_emb_size, self.input_features]

    @property
    def input_features(self) -> int:
        """Number of input features of a token."""
        return self.patch_features


def joint_layer_parts(
    model: ModelConfig,
    *,
    norm: QkNorm = QkNorm.PER_HEAD,
    activation: Activation = Activation.GELU_TANH,
    bias: bool = True,
) -> dict[str, Any]:
    """The arguments `attention` and `feed_forward` of `double_layer` and `single_layer`.

    `norm` is the norm of queries and keys, `activation` the activation of the MLP.
    """
    width, hidden, heads = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads
    return {
        "attention": AttentionSpec(width=width, heads=heads, bias=bias, norm=norm),
        "feed_forward": FeedForwardSpec(
            width=width, hidden=hidden, activation=activation, bias=bias
        ),
    }


_PER_BLOCK = PerBlockModulation()


def double_layer(
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
    latents: WholeLayerModulation = _PER_BLOCK,
    text: WholeLayerModulation = _PER_BLOCK,
) -> LayerSpec:
    """A double-stream layer: latents and text have separate weights, but attend to each other.

    `latents` and `text` are the modulations of the two streams.
    """
    m, t = Modulation("modulation", latents), Modulation("text_modulation", text)
    of_text = Port(TEXT_TOKENS, "text_attention", t[0])
    return LayerSpec(
        (
            Attend(Port(TOKENS, "attention", m[0]), attention, of_text),
            Feed(Port(TOKENS, "mlp", m[1]), feed_forward),
            Feed(Port(TEXT_TOKENS, "text_mlp", t[1]), feed_forward),
        )
    )


def single_layer(
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
    modulation: WholeLayerModulation = _PER_BLOCK,
    *,
    fused: bool = False,
) -> LayerSpec:
    """A single-stream layer: attention and feed-forward over latents and text as one sequence.

    `fused` says whether Diffusers also computes queries, keys, values and hidden units by one
    linear.
    """
    joint = Port(JOINT_TOKENS, slot=Modulation("modulation", modulation)[0])
    return LayerSpec((AttendAndFeed(joint, attention, feed_forward, fused),))


def sequential_layer(
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
    modulation: Modulation | None,
    row: str = JOINT_TOKENS,
    *,
    norm: RowNorm,
    after: bool = False,
    attend: Callable[[Port, AttentionSpec], Attend] = Attend,
) -> LayerSpec:
    """A layer of attention, then feed-forward, on the stream of tokens `row`.

    `norm`, which has weights, comes before attention and before the feed-forward; with `after`
    there is also one after each (sandwich norms). `modulation` is None for layers without it, as in
    refiners of text. `attend` creates the attention part of the layer.
    """

    def port(module: str, number: int) -> Port:
        before, behind = (replace(norm, name=f"{name}_{number}") for name in ("norm", "after"))
        slot = None if modulation is None else modulation[number - 1]
        return Port(row, module, slot, before, behind if after else None)

    steps = (attend(port("attention", 1), attention), Feed(port("mlp", 2), feed_forward))
    return LayerSpec(steps, norms_first=True)


def double_then_single(
    model: DoubleSingleConfig,
    *,
    latents: WholeLayerModulation = _PER_BLOCK,
    text: WholeLayerModulation = _PER_BLOCK,
    single: WholeLayerModulation = _PER_BLOCK,
    fused: bool = False,
    **of_layers: Any,
) -> tuple[StackSpec, ...]:
    """Two stacks: `num_layers` double-stream layers, then `num_single_layers` single-stream layers.

    `latents` and `text` are the modulations in double-stream layers, `single` is the modulation in
    single-stream layers, and `fused` is as in `single_layer`. Other arguments are those of
    `joint_layer_parts`.
    """
    parts = joint_layer_parts(model, **of_layers)
    first = double_layer(**parts, latents=latents, text=text)
    then = single_layer(**parts, modulation=single, fused=fused)
    return (
        StackSpec(name="double_blocks", count=model.num_layers, layer=first),
        StackSpec(name="single_blocks", count=model.num_single_layers, layer=then),
    )
