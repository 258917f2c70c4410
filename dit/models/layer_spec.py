"""Sizes and choices of the layers of a network, with what they cost.

A family describes its network by these values alone, so that parameters, operations and the cut
into pipeline stages follow from one description. Nothing here needs torch: a plan for a cluster is
made on machines without it.
"""

# D model width, F width inside a feed-forward, K head width; n latent tokens, m text tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """What stands between the two linears of a feed-forward."""

    GELU = "gelu"  # exact (erf)
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SWIGLU = "swiglu"  # silu(gate) * up: the first linear makes both

    @property
    def inputs(self) -> int:
        """Numbers that the first linear makes for each hidden unit."""
        return 2 if self is Activation.SWIGLU else 1


class QkNorm(StrEnum):
    """RMSNorm of queries and keys."""

    NONE = "none"
    PER_HEAD = "per_head"  # over the width of each head, one weight [K] for all heads
    ACROSS_HEADS = "across_heads"  # over all heads of a token, weight [D]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Attention over one token row."""

    width: int  # D, of tokens and of all heads together
    heads: int
    bias: bool = False  # of every linear
    norm: QkNorm = QkNorm.PER_HEAD
    eps: float = 1e-6  # of that norm

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def norm_parameters(self) -> int:
        sizes = {QkNorm.NONE: 0, QkNorm.PER_HEAD: self.head_width, QkNorm.ACROSS_HEADS: self.width}
        return 2 * sizes[self.norm]

    def parameters(self, key_width: int) -> int:
        """Of queries, keys and values, output and norms; keys come from rows of `key_width`."""
        matrices = 2 * self.width**2 + 2 * key_width * self.width
        return matrices + self.bias * 4 * self.width + self.norm_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec:
    """Two linears with an activation between them."""

    width: int  # D
    hidden: int  # F, any number
    activation: Activation = Activation.GELU
    bias: bool = False

    @property
    def multiplications(self) -> int:
        """For each token; as many as weights in the two matrices."""
        return self.width * self.hidden * (1 + self.activation.inputs)

    @property
    def parameters(self) -> int:
        biases = self.hidden * self.activation.inputs + self.width
        return self.multiplications + self.bias * biases


@dataclass(frozen=True, slots=True)
class LowRankModulation:
    """Two linears D -> rank -> 3 D for each part of a layer, plus a shift that all layers share.

    Source: Cosmos (`adaln_lora_dim`).
    """

    rank: int

    def parameters(self, width: int, rows: int) -> int:
        """Of the matrices that make `rows` vectors of `width` (scales, shifts and gates)."""
        return -(-rows // 3) * width * self.rank + rows * width * self.rank

    multiplications = parameters  # for each level row


@dataclass(frozen=True, slots=True)
class PerBlockModulation:
    """One linear D -> k D for each layer and token row, split over tensor ranks (FLUX, Qwen)."""

    bias: bool = True

    def parameters(self, width: int, rows: int) -> int:
        return rows * width * (width + self.bias)

    def multiplications(self, width: int, rows: int) -> int:
        return rows * width * width


@dataclass(frozen=True, slots=True)
class TableModulation:
    """A learned row for each scale, shift and gate, plus rows that all layers share (Wan, LTX).

    Computed in float32 whatever the type of the weights, as in Wan's published code.
    """

    def parameters(self, width: int, rows: int) -> int:
        return rows * width

    def multiplications(self, width: int, rows: int) -> int:  # noqa: ARG002
        return 0


WholeLayerModulation = PerBlockModulation | TableModulation
"""One module for all parts of a layer."""
ModulationSpec = LowRankModulation | WholeLayerModulation


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossLayerSpec:
    """Self-attention, cross-attention to text and feed-forward, one after the other."""

    attention: AttentionSpec
    cross_attention: AttentionSpec
    text_width: int  # of the text that the layer attends to
    feed_forward: FeedForwardSpec
    modulation: ModulationSpec
    gated_cross: bool = True  # False: after an affine LayerNorm, without modulation or gate (Wan)

    @property
    def _rows(self) -> int:
        return 9 if self.gated_cross else 6

    @property
    def token_multiplications(self) -> int:
        """Of the linears, for each latent token."""
        return 6 * self.attention.width**2 + self.feed_forward.multiplications

    @property
    def parameters(self) -> int:
        width = self.attention.width
        affine = 0 if self.gated_cross else 2 * width
        return (
            self.attention.parameters(width)
            + self.cross_attention.parameters(self.text_width)
            + self.feed_forward.parameters
            + self.modulation.parameters(width, self._rows)
            + affine
        )

    def multiplications(self, tokens: Sequence[int], text: Sequence[int]) -> int:
        """Of a forward pass over samples of `tokens` latent and `text` text tokens."""
        width = self.attention.width
        linears = sum(tokens) * self.token_multiplications
        linears += sum(text) * self.text_width * 2 * width
        attention = 2 * width * sum(n * (n + m) for n, m in zip(tokens, text, strict=True))
        return (
            linears + attention + len(tokens) * self.modulation.multiplications(width, self._rows)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubleLayerSpec:
    """Latents and text with weights of their own, and attention over both together."""

    attention: AttentionSpec  # of either row
    feed_forward: FeedForwardSpec  # of either row
    modulation: WholeLayerModulation = PerBlockModulation()
    text_is_read: bool = True
    """Whether anything reads the text after the last layer. Where nothing does, the last layer does
    not compute it, and `DoubleStreamLayer.unused` names the weights that get no gradient."""

    @property
    def token_multiplications(self) -> int:
        """Of the linears, for each token of either row."""
        return 4 * self.attention.width**2 + self.feed_forward.multiplications

    @property
    def parameters(self) -> int:
        width = self.attention.width
        row = self.attention.parameters(width) + self.feed_forward.parameters
        return 2 * (row + self.modulation.parameters(width, 6))

    def multiplications(self, tokens: Sequence[int], text: Sequence[int]) -> int:
        """Of a forward pass over samples of `tokens` latent and `text` text tokens."""
        width = self.attention.width
        joint = [n + m for n, m in zip(tokens, text, strict=True)]
        made = sum(joint) * self.token_multiplications + 2 * width * sum(n * n for n in joint)
        return made + 2 * len(joint) * self.modulation.multiplications(width, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleLayerSpec:
    """Attention and feed-forward side by side, over latents and text in one row."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    modulation: WholeLayerModulation = PerBlockModulation()

    @property
    def token_multiplications(self) -> int:
        """Of the linears, for each token."""
        return 4 * self.attention.width**2 + self.feed_forward.multiplications

    @property
    def parameters(self) -> int:
        width = self.attention.width
        # Both outputs are added to one row, so that they need one bias.
        spare = self.feed_forward.bias * width
        parts = self.attention.parameters(width) + self.feed_forward.parameters - spare
        return parts + self.modulation.parameters(width, 3)

    def multiplications(self, tokens: Sequence[int], text: Sequence[int]) -> int:
        """Of a forward pass over samples of `tokens` latent and `text` text tokens."""
        width = self.attention.width
        joint = [n + m for n, m in zip(tokens, text, strict=True)]
        made = sum(joint) * self.token_multiplications + 2 * width * sum(n * n for n in joint)
        return made + len(joint) * self.modulation.multiplications(width, 3)


LayerSpec = CrossLayerSpec | DoubleLayerSpec | SingleLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers of one stack that one pipeline stage holds."""

    first: int  # counted from 0 over the whole stack
    count: int


def pipeline_stages(stacks: Sequence[StackSpec], stages: int) -> list[dict[str, StageLayers]]:
    """For each stage, virtual ones too, its layers of each stack by name.

    The slowest stage sets the pace, so that its operations are the fewest possible; layers of
    equal cost are divided evenly. Only linears count: what attention adds depends on the packs.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    names = [stack.name for stack in stacks for _ in range(stack.count)]
    costs = [stack.layer.token_multiplications for stack in stacks for _ in range(stack.count)]
    if len(costs) < stages:
        raise ValueError(
            f"{len(costs)} layers do not fill {stages} pipeline stages; lower"
            " model.pipeline_model_parallel_size or model.virtual_pipeline_model_parallel_size"
        )
    plan = []
    for first, last in _balanced(costs, stages):
        held = {}
        for stack in stacks:
            here = [i for i in range(first, last) if names[i] == stack.name]
            before = names.index(stack.name) if stack.name in names else 0
            start = (here[0] if here else min(max(first, before), before + stack.count)) - before
            held[stack.name] = StageLayers(start, len(here))
        plan.append(held)
    return plan


def _balanced(costs: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Contiguous parts [first, last), none empty: least maximum, then least sum of squares."""
    ends = [0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    # (worst part, sum of squares, where the last part begins) of the first i costs
    best: list[tuple[int, int, int] | None] = [(0, 0, 0)] + [None] * len(costs)
    begins = []
    for part in range(1, parts + 1):
        row: list[tuple[int, int, int] | None] = [None] * len(best)
        for last in range(part, len(best) - (parts - part)):
            for first in range(part - 1, last):
                if (before := best[first]) is not None:
                    cost = ends[last] - ends[first]
                    made = (max(before[0], cost), before[1] + cost**2, first)
                    row[last] = min(made, row[last] or made)
        begins.append(row)
        best = row
    bounds, last = [], len(costs)
    for row in reversed(begins):
        chosen = row[last]
        assert chosen is not None
        bounds.append((chosen[2], last))
        last = chosen[2]
    return bounds[::-1]
