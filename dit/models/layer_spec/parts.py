"""Specifications of attention, feed-forward and modulation: sizes and choices.

A modulation computes scales, shifts and gates of a layer from the timestep embedding.
"""

# D model width, F width inside a feed-forward, K head width

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Activation(StrEnum):
    """Activation function after the first linear of a feed-forward."""

    GELU = "gelu"  # exact (erf)
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SWIGLU = "swiglu"  # silu(gate) * up: the first linear makes both
    GEGLU = "geglu"  # gelu(gate) * up, exact (erf), likewise

    @property
    def inputs(self) -> int:
        """Outputs of the first linear for each hidden unit: 2 if gated, else 1."""
        return 2 if self in (Activation.SWIGLU, Activation.GEGLU) else 1


class QkNorm(StrEnum):
    """Over which numbers the RMSNorm of queries and keys is computed."""

    NONE = "none"
    PER_HEAD = "per_head"  # over the width of each head, one weight [K] for all heads
    ACROSS_HEADS = "across_heads"  # over all heads of a token, weight [D]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Specification of attention over one row of tokens."""

    width: int  # D, of tokens and of all heads together
    heads: int
    bias: bool = False  # of every linear
    norm: QkNorm = QkNorm.PER_HEAD
    eps: float = 1e-6  # of that norm
    groups: int | None = None
    """Number of heads of keys and of values, each of which serves equally many heads of queries.
    None: one for each head of queries."""
    head_gate: bool = False
    """Whether each head's output is multiplied by twice the sigmoid of a linear D -> H of the
    tokens that its queries come from (LTX-2.3)."""

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.heads if self.groups is None else self.groups


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec:
    """Specification of a feed-forward: two linears with an activation between them."""

    width: int  # D
    hidden: int  # F, any number
    activation: Activation = Activation.GELU
    bias: bool = False

    @property
    def exchanges(self) -> int:
        return 1


ALL_NOISE = 1000.0
"""Timestep that networks get for t = 1, all noise."""
LEVEL_WAVES = 256
"""Width of the sinusoid of a timestep or guidance scale; fixed in Diffusers."""


REFINER_RATIO = 4
"""MLP width of a token refiner divided by the hidden size; fixed in Diffusers."""
MOST_REFINER_LAYERS = 16


@dataclass(frozen=True, slots=True)
class PerBlockModulation:
    """Modulation by a linear D -> k D in each layer and token row, split over tensor ranks.

    FLUX and Qwen-Image have it; k is the number of scales, shifts and gates.
    """

    inputs: int | None = None
    """Width of the linear's input; None: the model's width."""
    activated: bool = True
    """Whether the linear's input is the SiLU of the embedding (in all families but Z-Image)."""


@dataclass(frozen=True, slots=True)
class TableModulation:
    """A learned table of scales, shifts and gates, plus rows shared by layers (Wan, LTX).

    It is computed in float32 whatever the dtype of the weights, as in Wan's published code.
    """


@dataclass(frozen=True, slots=True)
class SharedModulation:
    """Scales, shifts and gates computed once for a stack, whose layers need no weights (FLUX.2)."""

    first: int
    """Index of the stack's first vector among those of all stacks; a vector is one scale, shift or
    gate."""
    each: int = 0
    """Number of vectors from the first of one layer to the first of the next (Chroma); 0: all
    layers use the same vectors."""


@dataclass(frozen=True)
class FamilyModulation:
    """A modulation of one family alone, which names the class that computes it."""

    runs: ClassVar[str]
    """The `AdaLNModule` that computes it, as `module:class`, made with (build context, width,
    specification)."""


PER_BLOCK = PerBlockModulation()
WholeLayerModulation = PerBlockModulation | TableModulation | SharedModulation
"""A modulation that is one module for all parts of a layer."""
ModulationSpec = WholeLayerModulation | FamilyModulation
