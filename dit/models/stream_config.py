"""Configuration and layers of networks with double-stream layers, then single-stream ones.

FLUX.1 and Chroma are such networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, at_least_one
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    Cost,
    DoubleLayerSpec,
    FeedForwardSpec,
    RowKind,
    SingleLayerSpec,
    StackSpec,
    WholeLayerModulation,
    replicated,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubleSingleConfig(ModelConfig):
    """The network: sizes, precision and how it is spread over devices."""

    most: ClassVar[Mapping[str, float]] = {"num_single_layers": 2**14, "rope_axes": 2**17}
    shown_before: ClassVar[Mapping[str, str]] = {"num_single_layers": "hidden_size"}

    num_layers: int = 19
    """Double-stream layers: latents and text have weights of their own, and attention over both."""
    num_single_layers: int = 38
    """Single-stream layers after them, on one row of latents and text."""
    hidden_size: int = 3072
    num_attention_heads: int = 24
    """Heads of attention over latents and text."""
    crossattn_emb_size: int = 4096
    rope_axes: tuple[int, int, int] = (16, 56, 56)
    """Numbers of a head that turn with frame or reference, row and column; they add up to it."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        return [
            *at_least_one(self, "num_single_layers"),
            (
                all(axis >= 2 and axis % 2 == 0 for axis in self.rope_axes),
                f"rope_axes={list(self.rope_axes)} must be even numbers of at least 2",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        heads = self.num_attention_heads
        width = self.hidden_size // heads
        return [
            (
                self.hidden_size % heads > 0 or sum(self.rope_axes) == width,
                f"rope_axes={list(self.rope_axes)} add up to {sum(self.rope_axes)}, and"
                f" hidden_size={self.hidden_size} / num_attention_heads={heads} gives heads of"
                f" width {width}; choose axes that add up to it",
            ),
            (
                self.ffn_hidden_size % heads == 0,
                f"the MLP width {self.ffn_hidden_size} (hidden_size * mlp_ratio) does not divide by"
                f" num_attention_heads={heads}, by which single-stream layers share it out",
            ),
        ]

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.num_single_layers

    @property
    def cost_sizes(self) -> list[int]:
        sizes = ModelConfig.cost_sizes.fget(self)  # type: ignore[attr-defined]
        return [*sizes, self.num_single_layers, self.crossattn_emb_size, self.input_features]

    @property
    def input_features(self) -> int:
        """Numbers in one token of what the network is fed."""
        return self.patch_features


def double_and_single(
    model: DoubleSingleConfig,
    *,
    double: WholeLayerModulation,
    single: WholeLayerModulation,
) -> tuple[StackSpec, ...]:
    """The layers, with the modulations of either kind."""
    width = model.hidden_size
    parts: Any = {
        "attention": AttentionSpec(width=width, heads=model.num_attention_heads, bias=True),
        "feed_forward": FeedForwardSpec(
            width=width,
            hidden=model.ffn_hidden_size,
            activation=Activation.GELU_TANH,
            bias=True,
        ),
    }
    first = DoubleLayerSpec(**parts, modulation=double)
    then = SingleLayerSpec(**parts, modulation=single)
    return (
        StackSpec(name="double_blocks", count=model.num_layers, layer=first),
        StackSpec(name="single_blocks", count=model.num_single_layers, layer=then),
    )


def embedder_cost(model: DoubleSingleConfig) -> Cost:
    """Of the linears of patches and of text."""
    width = model.hidden_size
    total = replicated(model.patch_features, width, bias=True)
    return total + replicated(model.crossattn_emb_size, width, rows=RowKind.TEXT, bias=True)
