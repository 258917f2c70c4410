"""What families describe alike whose layers attend to latents and text together (FLUX, SD3, ...).

Layers, head, weights and rules of sizes. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dit.config.checks import Rule
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    Cost,
    DoubleLayerSpec,
    FeedForwardSpec,
    PerBlockModulation,
    SingleLayerSpec,
    StackSpec,
    replicated,
)

JOINT_PARTS: Mapping[str, str] = {
    "modulate_out": "head",
    "proj_out": "head",
    "modulation": "modulation",
    "attention": "attention",
    "mlp": "mlp",
}
"""`Family.parts` of double-stream layers and the head."""
ADALN_ZERO = ("*modul*.linear.weight", "*proj_out.weight")
"""`WeightRules.zero`: each layer starts as the identity (adaLN-Zero, arXiv:2212.09748, Sec. 3.2),
and the output of the network as 0."""


def joint_layer_parts(model: Any) -> dict[str, Any]:
    """Attention and feed-forward of the layers of either kind."""
    width, hidden = model.hidden_size, model.ffn_hidden_size
    return {
        "attention": AttentionSpec(width=width, heads=model.num_attention_heads, bias=True),
        "feed_forward": FeedForwardSpec(
            width=width, hidden=hidden, activation=Activation.GELU_TANH, bias=True
        ),
    }


def double_then_single(model: Any) -> tuple[StackSpec, ...]:
    """`num_layers` double-stream layers, then `num_single_layers` single-stream ones."""
    parts = joint_layer_parts(model)
    double, single = DoubleLayerSpec(**parts), SingleLayerSpec(**parts)
    return (
        StackSpec(name="double_blocks", count=model.num_layers, layer=double),
        StackSpec(name="single_blocks", count=model.num_single_layers, layer=single),
    )


def joint_head_cost(model: Any) -> Cost:
    """Of the modulated norm and the linear behind the layers."""
    width = model.hidden_size
    outputs = replicated(width, model.output_features, bias=True)
    return PerBlockModulation().cost(width, 2) + outputs


def even_axes(model: Any) -> Rule:
    """Rotary positions turn pairs of numbers."""
    axes = list(model.rope_axes)
    return (
        all(axis >= 2 and axis % 2 == 0 for axis in axes),
        f"rope_axes={axes} must be even numbers of at least 2",
    )


def axes_fill_heads(model: Any) -> Rule:
    """All numbers of a head turn with one of the axes."""
    heads, axes = model.num_attention_heads, list(model.rope_axes)
    width = model.hidden_size // heads
    return (
        model.hidden_size % heads > 0 or sum(axes) == width,
        f"rope_axes={axes} add up to {sum(axes)}, and hidden_size={model.hidden_size} /"
        f" num_attention_heads={heads} gives heads of width {width}; choose axes that add"
        " up to it",
    )


def heads_share_mlp(model: Any) -> Rule:
    """Single-stream layers lay attention and feed-forward out head by head."""
    heads = model.num_attention_heads
    return (
        model.ffn_hidden_size % heads == 0,
        f"the MLP width {model.ffn_hidden_size} (hidden_size * mlp_ratio) does not divide by"
        f" num_attention_heads={heads}, by which single-stream layers share it out",
    )


def attends_to_no_padding(model: Any, title: str) -> Rule:
    """Of families whose published weights mask the padding of captions."""
    return (
        model.text_pad_to is None,
        f"text_pad_to={model.text_pad_to}: {title} attends to no padding of captions; set it to"
        " null",
    )
