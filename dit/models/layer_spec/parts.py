"""Specifications of attention, feed-forward and modulation: sizes and choices.

A modulation computes scales, shifts and gates of a layer from the timestep embedding.
"""

# D model width, F width inside a feed-forward, K head width

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """Activation function between the two linears of a feed-forward."""

    GELU = "gelu"  # exact (erf)
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SWIGLU = "swiglu"  # silu(gate) * up: the first linear makes both
    GEGLU = "geglu"  # gelu(gate) * up, exact (erf), likewise

    @property
    def inputs(self) -> int:
        """Outputs of the first linear for each hidden unit (2 if gated)."""
        return 2 if self in (Activation.SWIGLU, Activation.GEGLU) else 1


class QkNorm(StrEnum):
    """RMSNorm of queries and keys."""

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
    """Number of key and value heads (grouped-query attention); None: as many as query heads."""
    twisted: bool = False
    """Whether the two numbers of a rotary pair have different angles, which no fused kernel
    supports."""
    centred: bool = False
    """Whether the weights of the norm of queries and keys are stored minus 1."""
    output_gate: bool = False
    """Whether attention's output is multiplied by the sigmoid of a linear of its input."""
    states: int | None = None
    """Number of rows of each token that attend only to each other, such as hidden states of several
    encoder layers; None: tokens attend to their sample's tokens."""
    sparse_pairs: float | None = None
    """Fraction of query-key pairs that video sparse attention (VSA) computes, with a gated coarse
    part; None: dense attention."""

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.heads if self.groups is None else self.groups


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec:
    """A feed-forward: two linears with an activation between them."""

    width: int  # D
    hidden: int  # F, any number
    activation: Activation = Activation.GELU
    bias: bool = False

    @property
    def exchanges(self) -> int:
        return 1


MOST_EXPERTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: feed-forwards weighted by a router, and a shared one (HiDream).

    y = shared(x) + sum of p_e expert_e(x) over the `chosen` largest of p = softmax(router(x))
    """

    expert: FeedForwardSpec
    shared: FeedForwardSpec
    count: int
    chosen: int
    """Number of experts with weight for each token; all experts are computed."""

    @property
    def width(self) -> int:
        return self.expert.width

    @property
    def hidden(self) -> int:
        """Hidden units of all experts together."""
        return self.shared.hidden + self.count * self.expert.hidden

    @property
    def exchanges(self) -> int:
        return 1 + self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTextSpec:
    """Text of which each layer sees another hidden state of the encoder (HiDream).

    Each layer projects its own state; the last layer's is projected before all layers.
    """

    width: int
    """Width of one hidden state."""
    states: tuple[int, ...]
    """Index of the hidden state that each layer of the network sees."""
    first: int = 0
    """Number of layers in the stacks before this one."""

    def state(self, layer: int) -> int | None:
        """Index of the hidden state for a `layer` of the stack.

        None for the network's last layer.
        """
        number = self.first + layer
        return self.states[number] if number + 1 < len(self.states) else None

    def columns(self, state: int) -> slice:
        """The columns of one hidden state among all hidden states side by side."""
        return slice(state * self.width, (state + 1) * self.width)


ALL_NOISE = 1000.0
"""Timestep that networks get for t = 1."""
LEVEL_WAVES = 256
"""Width of the sinusoid of a noise level or guidance scale; fixed in Diffusers."""


REFINER_RATIO = 4
"""MLP width of a token refiner divided by the hidden size; fixed in Diffusers."""
MOST_REFINER_LAYERS = 16


@dataclass(frozen=True, slots=True)
class LowRankModulation:
    """Modulation by two linears D -> rank -> 3 D per sublayer, plus a shift shared by all layers.

    Source: Cosmos (`adaln_lora_dim`).
    """

    rank: int


@dataclass(frozen=True, slots=True)
class PerBlockModulation:
    """Modulation by one linear D -> k D per layer and token row, split over tensor ranks.

    FLUX and Qwen-Image have it.
    """

    bias: bool = True
    inputs: int | None = None
    """Width of the linear's input; None: the model's width."""
    activated: bool = True
    """Whether the input is the SiLU of the embedding (in all families but Z-Image)."""


@dataclass(frozen=True, slots=True)
class TableModulation:
    """A learned vector for each scale, shift and gate, plus vectors shared by layers (Wan, LTX).

    Computed in float32 whatever the dtype of the weights, as in Wan's published code.
    """


@dataclass(frozen=True, slots=True)
class ApproximatorModulation:
    """Modulation vectors that one network computes for all layers, which have no weights (Chroma).

    The vectors of a layer follow those of the layer before it.
    """

    first: int
    """Index of the first vector of the stack's first layer."""


@dataclass(frozen=True, slots=True)
class SharedModulation:
    """Modulation vectors computed once for a whole stack, whose layers have no weights (FLUX.2)."""

    first: int
    """Index of the stack's first vector among those of all stacks."""


PER_BLOCK = PerBlockModulation()
WholeLayerModulation = (
    PerBlockModulation | TableModulation | ApproximatorModulation | SharedModulation
)
"""Modulations that one module computes for all sublayers of a layer."""
ModulationSpec = LowRankModulation | WholeLayerModulation
