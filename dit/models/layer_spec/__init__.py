"""Specifications of layers, from which networks are built: sizes and choices.

shapes  rows of tokens, attention between them, and memory that the backward pass needs
parts   attention and feed-forward; scales, shifts and gates
layers  layers made of parts, stacks, and the stacks of a network

This folder does not need torch, which neither a printed configuration nor a worker of the loader
imports. Parameters and operations come from the network itself (`dit/sizing`).
"""

from dit.models.layer_spec.layers import (
    CrossLayerSpec,
    DoubleLayerSpec,
    LayerSpec,
    NetworkSpec,
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
)
from dit.models.layer_spec.shapes import NOTHING, AttentionShape, Kept, KeptBy, LayerNeeds, RowKind
