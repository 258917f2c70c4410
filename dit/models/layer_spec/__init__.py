"""Specifications of layers, from which networks are built: sizes and choices.

shapes  rows of tokens, and who attends to whom
parts   attention and feed-forward; scales, shifts and gates
steps   a layer as steps over named rows of tokens
layers  stacks of layers, and the stacks of a network

Nothing here needs torch, which neither a printed configuration nor a worker of the loader imports.
Parameters, operations and what the backward pass needs are asked of the network (`dit/sizing`).
"""

from dit.models.layer_spec.layers import (
    NetworkSpec,
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
    FamilyModulation,
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
from dit.models.layer_spec.shapes import AttentionShape, RowKind
from dit.models.layer_spec.steps import (
    JOINT_TOKENS,
    SOUND_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    Attend,
    AttendAndFeed,
    AttendTo,
    Feed,
    KeyRows,
    LayerPart,
    LayerSpec,
    Modulation,
    NormKind,
    PicturesAlone,
    Port,
    ReferencesAlone,
    RowNorm,
    View,
)
