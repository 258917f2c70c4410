"""Specifications of layers (sizes and choices), from which networks are built.

shapes   which tokens attend to which
parts    attention, feed-forward and modulation
steps    a layer as a sequence of parts, each with named streams of tokens as inputs and outputs
layers   stacks of layers, and the stacks of a network

Nothing in this folder needs torch, because `--dry-run` and the workers of the loader use it.
Parameters, FLOPs and saved activations are measured on the network itself (`dit/sizing`).
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
