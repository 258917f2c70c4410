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
    SWIGLU = "swiglu"  # silu(gate) * up; gate and up are outputs of the first linear
    GEGLU = "geglu"  # gelu(gate) * up, with exact gelu (erf)

    @property
    def inputs(self) -> int:
        """Number of outputs of the first linear for each hidden unit: 2 if gated, else 1."""
        return 2 if self in (Activation.SWIGLU, Activation.GEGLU) else 1


class QkNorm(StrEnum):
    """The RMSNorm of queries and keys: over which numbers it is computed."""

    NONE = "none"
    PER_HEAD = "per_head"  # over the width of each head, one weight [K] for all heads
    ACROSS_HEADS = "across_heads"  # over all heads of a token, weight [D]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Specification of an attention: sizes, norm of queries and keys, gate."""

    width: int  # D, the width of tokens and of all heads together
    heads: int
    bias: bool = False  # whether linears have biases
    norm: QkNorm = QkNorm.PER_HEAD
    eps: float = 1e-6  # of `norm`
    groups: int | None = None
    """Number of key and value heads in grouped-query attention; None: one for each query head."""
    head_gate: bool = False
    """Whether the output of each head is multiplied by 2 * sigmoid(linear(x)), with a linear D ->
    number of heads, and x the tokens of the queries (LTX-2.3)."""

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
    hidden: int  # F
    activation: Activation = Activation.GELU
    bias: bool = False

    @property
    def exchanges(self) -> int:
        return 1


ALL_NOISE = 1000.0
"""Timestep that networks get for t = 1, all noise."""
LEVEL_WAVES = 256
"""Width of the sinusoidal embedding of a timestep or guidance scale; fixed in Diffusers."""


REFINER_RATIO = 4
"""MLP width of a token refiner divided by the hidden size; fixed in Diffusers."""
MOST_REFINER_LAYERS = 16


@dataclass(frozen=True, slots=True)
class PerBlockModulation:
    """Modulation by a linear D -> k D in each layer, for each stream of tokens (FLUX, Qwen-Image).

    k is the number of scales, shifts and gates. Tensor ranks divide the outputs of the linear.
    """

    inputs: int | None = None
    """Width of the linear's input; None: the model's width."""
    activated: bool = True
    """Whether the linear's input is the SiLU of the embedding (in all families but Z-Image)."""


@dataclass(frozen=True, slots=True)
class TableModulation:
    """Modulation by a learned table in each layer, which is added to shared vectors (Wan, LTX).

    The shared vectors are computed from the timestep, once for all layers. The sum is computed in
    float32 whatever the dtype of the weights, as in Wan's published code.
    """


@dataclass(frozen=True, slots=True)
class SharedModulation:
    """Modulation by vectors that are computed once, before all layers (FLUX.2, Chroma).

    The layers have no weights for it. A vector is one scale, shift or gate.
    """

    first: int
    """Index of the first layer's first vector among all vectors."""
    each: int = 0
    """Number of vectors of each layer (Chroma); 0: all layers of the stack use the same vectors."""


@dataclass(frozen=True)
class FamilyModulation:
    """Base of specifications of modulations that only one family has."""

    runs: ClassVar[str]
    """The `AdaLNModule` that computes the modulation, as `module:class`. Its arguments are (build
    context, width, this specification)."""


PER_BLOCK = PerBlockModulation()
WholeLayerModulation = PerBlockModulation | TableModulation | SharedModulation
"""Modulations with one module for all parts of a layer."""
ModulationSpec = WholeLayerModulation | FamilyModulation
