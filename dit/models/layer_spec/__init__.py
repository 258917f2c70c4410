"""Sizes and choices of the layers of a network, and what each of them costs.

shapes  linears with the rows that they run over, who attends to whom, other weights; their sum;
        what the backward pass needs of each of them
parts   attention, feed-forward, embeddings, token refiners; scales, shifts and gates
layers  layers made of these, stacks, and a network made of stacks

A family describes its network by these values alone, so that parameters, operations, memory and the
cut into pipeline stages follow from one description. Nothing here needs torch: a plan for a cluster
is made on machines without it.
"""

from dit.models.layer_spec.layers import (
    CrossLayerSpec,
    DoubleLayerSpec,
    LayerSpec,
    NetworkCost,
    SequentialLayerSpec,
    SingleLayerSpec,
    StackSpec,
)
from dit.models.layer_spec.parts import (
    ALL_NOISE,
    LEVEL_WAVES,
    MOST_EXPERTS,
    MOST_REFINER_LAYERS,
    REFINER_RATIO,
    Activation,
    ApproximatorModulation,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerTextSpec,
    LowRankModulation,
    ModulationSpec,
    PerBlockModulation,
    QkNorm,
    SharedModulation,
    TableModulation,
    WholeLayerModulation,
    condition_cost,
    glyph_weights,
    refiner_cost,
    replicated,
    shared_modulation_cost,
)
from dit.models.layer_spec.shapes import Cost, Multiplications, RowKind, WeightShape
