"""Specifications of layers (sizes and choices), from which networks are built.

shapes   token rows, and which tokens attend to which
parts    attention and feed-forward; scales, shifts and gates
steps    a layer as steps over named rows of tokens
layers   stacks of layers, and the stacks of a network

Nothing in this folder needs torch, because it serves printed configurations and workers of the
loader. Parameters, FLOPs and saved activations are measured on the network itself (`dit/sizing`).
"""

from dit.models.layer_spec.layers import (
    NetworkSpec,
    StackSpec,
)
from dit.models.layer_spec.parts import (
    ALL_NOISE,
    LEVEL_WAVES,
    MOST_REFINER_LAYERS,
    REFINER_RATIO,
    Activation,
    AttentionSpec,
    FamilyModulation,
    FeedForwardSpec,
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
    AttendAcross,
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
    Slot,
    Step,
    View,
)
