"""Layers and costs of networks that refine latents and text apart (Lumina Image 2.0, Z-Image)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.config.resume import Refused
from dit.models.family import TINY_NETWORK
from dit.models.joint.family import (
    attends_to_no_padding,
    axes_fill_heads,
    embedder_cost,
    even_axes,
    key_heads_divide,
    learns_pictures,
)
from dit.models.layer_spec import (
    LEVEL_WAVES,
    MOST_REFINER_LAYERS,
    Activation,
    AttentionSpec,
    Cost,
    FeedForwardSpec,
    NetworkCost,
    PerBlockModulation,
    RowKind,
    SequentialLayerSpec,
    StackSpec,
    WeightShape,
    replicated,
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
"""What makes a network of these tiny (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefinedConfig(ModelConfig):
    """The network: sizes, precision and how it is spread over devices."""

    shown_before: ClassVar[Mapping[str, str]] = {"num_refiner_layers": "hidden_size"}
    refiners: ClassVar[int] = 2
    """Stacks of `num_refiner_layers` layers."""
    most_told: ClassVar[int] = 1024
    """Largest width of the embedding of the level."""
    title: ClassVar[str] = ""
    """Name of the network in messages."""

    num_layers: int = 26
    """Layers over latents and text together."""
    num_refiner_layers: Refused[int] = bounded(2, most=MOST_REFINER_LAYERS)
    """Layers before these over latents alone, and as many over text alone."""
    rope_axes: Refused[tuple[int, int, int]] = bounded((32, 32, 32), most=2**17, at_least_one=False)
    """Widths of a head rotated by place in the text, row and column; their sum is its width."""

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
        sizes = ModelConfig.cost_sizes.fget(self)  # type: ignore[attr-defined]
        return [*sizes, self.num_refiner_layers, self.crossattn_emb_size]

    @property
    def told_width(self) -> int:
        """Width of the embedding of the level."""
        return min(self.hidden_size, self.most_told)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRefinedConfig(RefinedConfig):
    """The network: sizes, precision and how it is spread over devices."""

    shown_before: ClassVar[Mapping[str, str]] = {
        **RefinedConfig.shown_before,
        "num_kv_heads": "mlp_ratio",
    }

    num_attention_heads: int = 24
    """Heads of queries."""
    num_kv_heads: Refused[int] = bounded(8, most=2**14)
    """Heads of keys and values, each read by num_attention_heads / num_kv_heads heads of queries;
    tensor ranks share them."""

    def own_sizes(self) -> list[Rule]:
        return [*RefinedConfig.own_sizes(self), attends_to_no_padding(self, self.title)]

    def own_shapes(self) -> list[Rule]:
        return [*RefinedConfig.own_shapes(self), *key_heads_divide(self)]

    @property
    def cost_sizes(self) -> list[int]:
        return [*RefinedConfig.cost_sizes.fget(self), self.num_kv_heads]  # type: ignore[attr-defined]


def sides_of_tables(model: ModelConfig, axes_lens: tuple[int, int, int]) -> tuple[int, int, int]:
    """The largest latent whose places have angles in tables of so many rows: frames, rows, columns.

    `axes_lens` counts the places of captions, then rows and columns of tokens.
    """
    rows, columns = (side * model.patch_spatial for side in axes_lens[1:])
    return 2**20, rows, columns


def refined_stacks(
    model: Any, attention: AttentionSpec, told: PerBlockModulation, *, references: int | None = None
) -> tuple[StackSpec, ...]:
    """The refiners, of which that of text knows no level, then the layers over both in one row.

    `references`: so many that a sample may have, with a refiner of their own; None: without one.
    """
    feed_forward = FeedForwardSpec(
        width=model.hidden_size, hidden=model.ffn_hidden_size, activation=Activation.SWIGLU
    )

    def layer(rows: RowKind, modulation: PerBlockModulation | None = told) -> SequentialLayerSpec:
        parts: Any = {"attention": attention, "feed_forward": feed_forward, "eps": attention.eps}
        return SequentialLayerSpec(rows=rows, modulation=modulation, **parts)

    few, reference_refiner = model.num_refiner_layers, ()
    if references is not None:
        own = replace(layer(RowKind.REFERENCES), idle=references == 0)
        reference_refiner = (StackSpec(name="reference_refiner", count=few, layer=own),)
    return (
        StackSpec(name="noise_refiner", count=few, layer=layer(RowKind.LATENTS)),
        *reference_refiner,
        StackSpec(name="context_refiner", count=few, layer=layer(RowKind.TEXT, None)),
        StackSpec(name="blocks", count=model.num_layers, layer=layer(RowKind.JOINT)),
    )


def refined_cost(
    model: Any, stacks: tuple[StackSpec, ...], *, inside_of_told: int, pad_tokens: int = 0
) -> NetworkCost:
    """The network: `inside_of_told` lies between the two linears of the level."""
    width, told = model.hidden_size, model.told_width
    weights = (WeightShape(numbers=model.crossattn_emb_size + pad_tokens * width),)
    before = embedder_cost(model) + Cost(weights=weights)
    for inputs, outputs in ((LEVEL_WAVES, inside_of_told), (inside_of_told, told)):
        before += replicated(inputs, outputs, rows=RowKind.SAMPLES, bias=True)
    after = PerBlockModulation(inputs=told).cost(width, 1)
    after += replicated(width, model.output_features, rows=RowKind.JOINT, bias=True)
    return NetworkCost(
        before=before, stacks=stacks, after=after, attended_multiple=model.attended_multiple
    )
