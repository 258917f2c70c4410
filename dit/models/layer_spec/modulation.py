"""Scales, shifts and gates of a layer: how they are made of the embedding of its level."""

# D model width, k vectors of a layer

from __future__ import annotations

from dataclasses import dataclass

from dit.models.layer_spec.parts import replicated
from dit.models.layer_spec.shapes import Cost, LinearShape, RowKind, WeightShape


@dataclass(frozen=True, slots=True)
class LowRankModulation:
    """Two linears D -> rank -> 3 D for each part of a layer, plus a shift that all layers share.

    Source: Cosmos (`adaln_lora_dim`).
    """

    rank: int

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates, three for each part."""
        total = Cost()
        for first in range(0, vectors, 3):
            made = min(3, vectors - first) * width
            total += replicated(width, self.rank, rows=RowKind.SAMPLES)
            total += replicated(self.rank, made, rows=RowKind.SAMPLES)
        return total


@dataclass(frozen=True, slots=True)
class PerBlockModulation:
    """One linear D -> k D for each layer and token row, split over tensor ranks (FLUX, Qwen)."""

    bias: bool = True

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates."""
        outputs, rows = vectors * width, RowKind.SAMPLES
        made = LinearShape(inputs=width, outputs=outputs, rows=rows, bias=self.bias, split=True)
        return Cost(linears=(made,))


@dataclass(frozen=True, slots=True)
class TableModulation:
    """A learned row for each scale, shift and gate, plus rows that all layers share (Wan, LTX).

    Computed in float32 whatever the type of the weights, as in Wan's published code.
    """

    def cost(self, width: int, vectors: int) -> Cost:
        """Of so many vectors of `width`: scales, shifts and gates, three for each part."""
        weights = (WeightShape(numbers=vectors * width),)
        return Cost(weights=weights)


@dataclass(frozen=True, slots=True)
class ApproximatorModulation:
    """Rows that one network makes for all layers together, so that layers have no weights (Chroma).

    Those of a layer follow those of the layer before it.
    """

    first: int
    """Row of the first layer of the stack."""
    first_of_text: int = 0
    """Likewise of the text of double-stream layers, whose rows are apart."""

    def cost(self, width: int, vectors: int) -> Cost:  # noqa: ARG002
        """Of a layer; the family describes the network that makes the rows."""
        return Cost()


PER_BLOCK = PerBlockModulation()
WholeLayerModulation = PerBlockModulation | TableModulation | ApproximatorModulation
"""One module for all parts of a layer."""
ModulationSpec = LowRankModulation | WholeLayerModulation
