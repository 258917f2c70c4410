"""Networks with separate refiners of latents and of text: sizes, rules and layer specifications.

They are Lumina Image 2.0, OmniGen2 and Z-Image. A refiner is a stack of layers over one stream of
tokens, before the joint layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.models.family import TINY_NETWORK
from dit.models.joint.family import (
    attends_to_no_padding,
    axes_fill_heads,
    even_axes,
    key_heads_divide,
    learns_pictures,
    sequential_layer,
)
from dit.models.layer_spec import (
    JOINT_TOKENS,
    MOST_REFINER_LAYERS,
    TEXT_TOKENS,
    TOKENS,
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    Modulation,
    NetworkSpec,
    PerBlockModulation,
    PicturesAlone,
    ReferencesAlone,
    RowNorm,
    StackSpec,
    View,
)

TINY_REFINED: Mapping[str, Any] = {
    **TINY_NETWORK,
    "num_refiner_layers": 1,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "mlp_ratio": 1.0,
    "crossattn_emb_size": 16,
    "rope_axes": (2, 2, 4),
}
"""Keys of `model` for tiny networks of these families (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class RefinedConfig(ModelConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    shown_before: ClassVar[Mapping[str, str]] = {"num_refiner_layers": "hidden_size"}
    refiners: ClassVar[int] = 2
    """Number of refiners, each with `num_refiner_layers` layers."""
    most_told: ClassVar[int] = 1024
    """Largest width that the timestep embedding may have."""
    title: ClassVar[str] = ""
    """Name of the network in messages."""

    num_layers: int = 26
    """Number of joint layers of latents and text."""
    num_refiner_layers: int = bounded(2, most=MOST_REFINER_LAYERS)
    """Number of layers of each refiner: one for latents, one for text, before the joint layers."""
    rope_axes: tuple[int, int, int] = bounded((32, 32, 32), most=2**17, least=None)
    """Widths of a head rotated by index in the text, by row, and by column; their sum is the head's
    width."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        return [even_axes(self), learns_pictures(self, self.title)]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self)]

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.refiners * self.num_refiner_layers

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        return [*sizes, self.num_refiner_layers, self.crossattn_emb_size]

    @property
    def told_width(self) -> int:
        """Width of the timestep embedding."""
        return min(self.hidden_size, self.most_told)


@dataclass(frozen=True, kw_only=True)
class GroupedRefinedConfig(RefinedConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    shown_before: ClassVar[Mapping[str, str]] = {
        **RefinedConfig.shown_before,
        "num_kv_heads": "mlp_ratio",
    }

    num_attention_heads: int = 24
    """Number of query heads."""
    num_kv_heads: int = bounded(8, most=2**14)
    """Number of key and value heads. Each serves num_attention_heads / num_kv_heads query heads;
    tensor_model_parallel_size must divide their number."""

    def own_sizes(self) -> list[Rule]:
        return [*super().own_sizes(), attends_to_no_padding(self, self.title)]

    def own_shapes(self) -> list[Rule]:
        return [*super().own_shapes(), *key_heads_divide(self)]

    @property
    def cost_sizes(self) -> list[int]:
        return [*super().cost_sizes, self.num_kv_heads]


def sides_of_tables(model: ModelConfig, axes_lens: tuple[int, int, int]) -> tuple[int, int, int]:
    """The largest latent (frames, rows, columns) that Diffusers' tables of rotary angles cover.

    `axes_lens` are the lengths of the tables for captions, rows of tokens and columns of tokens.
    Frames are not limited.
    """
    rows, columns = (side * model.patch_spatial for side in axes_lens[1:])
    return 2**20, rows, columns


def refined_stacks(
    model: RefinedConfig,
    attention: AttentionSpec,
    level: PerBlockModulation,
    *,
    references: int | None = None,
) -> tuple[StackSpec, ...]:
    """The specifications of the refiners of latents and of text, then of the joint layers.

    Layers of the text refiner have no modulation; `level` is the modulation of all others.
    `references` is the largest number of references, which have their own refiner; None: the
    network has no such refiner.
    """
    feed_forward = FeedForwardSpec(
        width=model.hidden_size, hidden=model.ffn_hidden_size, activation=Activation.SWIGLU
    )

    told = Modulation("modulation", level, shifted=False, tanh=True)
    parts: Any = {"norm": RowNorm("norm", eps=attention.eps), "after": True}

    def layer(row: str, told: Modulation | None = told, view: View | None = None) -> LayerSpec:
        made = sequential_layer(attention, feed_forward, told, row, **parts)
        return replace(made, view=view)

    few, pictures, reference_refiner = model.num_refiner_layers, None, ()
    if references is not None:
        pictures, own = PicturesAlone(), layer(TOKENS, view=ReferencesAlone(idle=references == 0))
        reference_refiner = (StackSpec(name="reference_refiner", count=few, layer=own),)
    return (
        StackSpec(name="noise_refiner", count=few, layer=layer(TOKENS, view=pictures)),
        *reference_refiner,
        StackSpec(name="context_refiner", count=few, layer=layer(TEXT_TOKENS, None)),
        StackSpec(name="blocks", count=model.num_layers, layer=layer(JOINT_TOKENS)),
    )


def refined_spec(model: RefinedConfig, stacks: tuple[StackSpec, ...]) -> NetworkSpec:
    """The specification of a network with these `stacks`.

    Text and latents of each sample are padded to multiples of `model.attended_multiple` tokens, to
    which layers attend.
    """
    return NetworkSpec(stacks=stacks, attended_multiple=model.attended_multiple)
