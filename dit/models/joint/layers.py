"""Layers and head of networks that attend to latents and text together, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dit.config import ModelConfig
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    Cost,
    DoubleLayerSpec,
    FeedForwardSpec,
    PerBlockModulation,
    RowKind,
    SingleLayerSpec,
    StackSpec,
    WholeLayerModulation,
    replicated,
)

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

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


def grid_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions`: indices of frames, whatever their rate, of rows and of columns."""
    from dit.models.positions import GridPositions

    return GridPositions()


def joint_layer_parts(model: Any) -> dict[str, Any]:
    """Attention and feed-forward of the layers of either kind."""
    width, hidden = model.hidden_size, model.ffn_hidden_size
    return {
        "attention": AttentionSpec(width=width, heads=model.num_attention_heads, bias=True),
        "feed_forward": FeedForwardSpec(
            width=width, hidden=hidden, activation=Activation.GELU_TANH, bias=True
        ),
    }


_PER_BLOCK = PerBlockModulation()


def double_then_single(
    model: Any,
    *,
    double: WholeLayerModulation = _PER_BLOCK,
    single: WholeLayerModulation = _PER_BLOCK,
) -> tuple[StackSpec, ...]:
    """`num_layers` double-stream layers, then `num_single_layers` single-stream ones.

    `double` and `single` are the modulations of either kind.
    """
    parts = joint_layer_parts(model)
    first = DoubleLayerSpec(**parts, modulation=double)
    then = SingleLayerSpec(**parts, modulation=single)
    return (
        StackSpec(name="double_blocks", count=model.num_layers, layer=first),
        StackSpec(name="single_blocks", count=model.num_single_layers, layer=then),
    )


def embedder_cost(model: Any) -> Cost:
    """Of the linears of patches and of one text."""
    width = model.hidden_size
    total = replicated(model.patch_features, width, bias=True)
    return total + replicated(model.crossattn_emb_size, width, rows=RowKind.TEXT, bias=True)


def joint_head_cost(model: Any) -> Cost:
    """Of the modulated norm and the linear behind the layers."""
    width = model.hidden_size
    outputs = replicated(width, model.output_features, bias=True)
    return PerBlockModulation().cost(width, 2) + outputs
