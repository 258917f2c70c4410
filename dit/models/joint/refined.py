"""Layers and costs of networks that refine latents and text apart (Lumina Image 2.0, Z-Image)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dit.models.joint.family import embedder_cost
from dit.models.layer_spec import (
    LEVEL_WAVES,
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
