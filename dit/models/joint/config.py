"""Sizes of networks with joint attention, and the rules that they obey."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, at_least_one
from dit.config.resume import Refused


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubleSingleConfig(ModelConfig):
    """The network: sizes, precision and how it is spread over devices."""

    most: ClassVar[Mapping[str, float]] = {"num_single_layers": 2**14, "rope_axes": 2**17}
    shown_before: ClassVar[Mapping[str, str]] = {"num_single_layers": "hidden_size"}

    num_layers: int = 19
    """Double-stream layers: latents and text have weights of their own, and attention over both."""
    num_single_layers: Refused[int] = 38
    """Single-stream layers after the double-stream ones, on latents and text together."""
    hidden_size: int = 3072
    num_attention_heads: int = 24
    """Heads of attention over latents and text."""
    crossattn_emb_size: int = 4096
    rope_axes: Refused[tuple[int, int, int]] = (16, 56, 56)
    """Widths of a head rotated by frame or reference, row and column; their sum is its width."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        return [*at_least_one(self, "num_single_layers"), even_axes(self)]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self), heads_share_mlp(self)]

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
