"""Sizes and choices of the layers of a network, and what each of them costs.

shapes      linears with the rows that they run over, who attends to whom, other weights; their sum
parts       attention, feed-forward, embeddings, token refiners
modulation  scales, shifts and gates
kept        what the backward pass needs of each of them
layers      layers made of these, and stacks
network     a network made of stacks

A family describes its network by these values alone, so that parameters, operations, memory and the
cut into pipeline stages follow from one description. Nothing here needs torch: a plan for a cluster
is made on machines without it.
"""

from dit.models.layer_spec.layers import (
    CrossLayerSpec,
    DoubleLayerSpec,
    LayerSpec,
    SingleLayerSpec,
    StackSpec,
)
from dit.models.layer_spec.modulation import (
    ApproximatorModulation,
    LowRankModulation,
    ModulationSpec,
    PerBlockModulation,
    TableModulation,
    WholeLayerModulation,
)
from dit.models.layer_spec.network import NetworkCost
from dit.models.layer_spec.parts import (
    LEVEL_WAVES,
    MOST_REFINER_LAYERS,
    REFINER_RATIO,
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    QkNorm,
    condition_cost,
    glyph_weights,
    refiner_cost,
    replicated,
)
from dit.models.layer_spec.shapes import Cost, Multiplications, RowKind, WeightShape

__all__ = [
    "LEVEL_WAVES",
    "MOST_REFINER_LAYERS",
    "REFINER_RATIO",
    "Activation",
    "ApproximatorModulation",
    "AttentionSpec",
    "Cost",
    "CrossLayerSpec",
    "DoubleLayerSpec",
    "FeedForwardSpec",
    "LayerSpec",
    "LowRankModulation",
    "ModulationSpec",
    "Multiplications",
    "NetworkCost",
    "PerBlockModulation",
    "QkNorm",
    "RowKind",
    "SingleLayerSpec",
    "StackSpec",
    "TableModulation",
    "WeightShape",
    "WholeLayerModulation",
    "condition_cost",
    "glyph_weights",
    "refiner_cost",
    "replicated",
]
