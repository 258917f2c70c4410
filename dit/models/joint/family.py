"""Sizes, rules and layers of networks with joint attention."""

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
"""`Family.parts` of networks with double-stream layers: parts whose gradient norms are logged."""
ADALN_ZERO = ("*modul*.linear.weight", "*proj_out.weight")
"""`WeightRules.zero` of adaLN-Zero (arXiv:2212.09748, Sec. 3.2): each layer starts as the identity,
and the network outputs 0."""


EVEN_STEPS: Mapping[str, Any] = {"name": "flow", "sampling_levels": "even"}
"""Keys of `objective` for pipelines whose scheduler gets even steps, from 1 to 1 / number of
steps."""
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
    """A configuration of a network that reads ByT5's states of words in quotation marks."""

    @property
    def glyph_embed_size(self) -> int: ...
    @property
    def glyph_hidden_size(self) -> int: ...


def even_axes(model: HasAxes) -> Rule:
    """The rule that each rotary axis has an even size, because numbers are rotated in pairs."""
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
        f"rope_axes={axes} add up to {sum(axes)}, and hidden_size={model.hidden_size} /"
        f" num_attention_heads={heads} gives heads of width {width}; choose axes that add"
        " up to it",
    )


def key_heads_divide(model: HasKeyHeads) -> list[Rule]:
    """Rules of grouped-query attention, on numbers that must divide other numbers.

    Key heads divide query heads, and tensor ranks divide key heads.
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
            f"num_kv_heads={keys} does not divide num_attention_heads={heads}, which share them",
        ),
        (
            keys % tp == 0,
            f"tensor_model_parallel_size={tp} does not divide num_kv_heads={keys}, which tensor"
            f" ranks share; choose {', '.join(allowed[:-1])}{' or ' * (keys > 1)}{allowed[-1]}",
        ),
    ]


def heads_share_mlp(model: ModelConfig) -> Rule:
    """The rule that heads divide the MLP, whose units single-stream layers order by head."""
    heads = model.num_attention_heads
    return (
        model.ffn_hidden_size % heads == 0,
        f"the MLP width {model.ffn_hidden_size} (hidden_size * mlp_ratio) does not divide by"
        f" num_attention_heads={heads}, by which single-stream layers share it out; choose"
        f" hidden_size and mlp_ratio that make it a multiple of {heads}",
    )


def attends_to_no_padding(model: ModelConfig, title: str) -> Rule:
    """The rule that captions are not padded, for networks whose attention masks padding.

    `title` names the network in the message.
    """
    return (
        model.text_pad_to is None,
        f"text_pad_to={model.text_pad_to}: {title} attends to no padding of captions; set it to"
        " null",
    )


def learns_pictures(model: ModelConfig, title: str) -> Rule:
    """The rule that a patch is one frame deep, for families of images.

    `title` names the network in the message.
    """
    return (
        model.patch_temporal == 1,
        f"patch_temporal={model.patch_temporal}: {title} learns pictures; set it to 1",
    )


def glyph_input(model: HasGlyphs, *, encoder: str) -> SampleInput:
    """The input with ByT5's states of words in quotation marks, which a sample may lack."""
    optional: Any = {"required": False, "may_be_empty": True, "encoder": encoder}
    return SampleInput(name=GLYPHS, kind=InputKind.TEXT, width=model.glyph_embed_size, **optional)


@dataclass(frozen=True, kw_only=True)
class DoubleSingleConfig(ModelConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    shown_before: ClassVar[Mapping[str, str]] = {"num_single_layers": "hidden_size"}

    num_layers: int = 19
    """Number of double-stream layers, in which latents and text have weights of their own, and
    attention is over both."""
    num_single_layers: int = bounded(38, most=2**14)
    """Number of single-stream layers after the double-stream ones, on latents and text together."""
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
        """Number of features of a token that enters the network."""
        return self.patch_features


def joint_layer_parts(
    model: ModelConfig,
    *,
    norm: QkNorm = QkNorm.PER_HEAD,
    activation: Activation = Activation.GELU_TANH,
    bias: bool = True,
) -> dict[str, Any]:
    """Keyword arguments of `double_layer` and `single_layer` that specify attention and MLP.

    `norm` is that of queries and keys; `activation` is that of the MLP.
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
    """A double-stream layer: latents and text have separate weights, and attention over both.

    `latents` and `text` are the modulations of the two rows.
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

    `fused` says that Diffusers, too, has queries, keys, values and hidden units in one linear.
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
    """A layer of attention, then feed-forward on the row `row`, each after a norm with weights.

    `norm` is that norm. `after` adds a norm of each output (sandwich). Without a modulation tokens
    are neither scaled nor gated, as in refiners of text. `attend` makes the part with the
    attention.
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
    """`num_layers` double-stream layers, then `num_single_layers` single-stream layers.

    `latents` and `text` are the modulations of these rows in double-stream layers, `single` is that
    of single-stream layers, and `fused` is as in `AttendAndFeed`. Other arguments are those of
    `joint_layer_parts`.
    """
    parts = joint_layer_parts(model, **of_layers)
    first = double_layer(**parts, latents=latents, text=text)
    then = single_layer(**parts, modulation=single, fused=fused)
    return (
        StackSpec(name="double_blocks", count=model.num_layers, layer=first),
        StackSpec(name="single_blocks", count=model.num_single_layers, layer=then),
    )
