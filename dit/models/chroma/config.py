"""The fields, named sizes and rules of the family `chroma`: Chroma1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import Precision
from dit.config.checks import Rule, at_least_one
from dit.config.resume import Refused
from dit.models.joint.config import DoubleSingleConfig

MOST_APPROXIMATOR_LAYERS = 64

MODEL_SIZES: dict[str, dict[str, Any]] = {"chroma": {}}
"""What each `model.name` sets; Chroma1 HD, Base and Flash are one size."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "chroma": {
        "num_layers": 4,
        "num_single_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "in_channels": 4,
        "crossattn_emb_size": 16,
        "rope_axes": (4, 4, 4),
        "approximator_channels": 8,
        "approximator_hidden_size": 20,
        "approximator_layers": 2,
        "precision": Precision.FP32,
    }
}
"""Named size -> what makes it tiny (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChromaConfig(DoubleSingleConfig):
    """The network: sizes, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {
        **DoubleSingleConfig.most,
        "approximator_channels": 2**20,
        "approximator_hidden_size": 2**20,
        "approximator_layers": MOST_APPROXIMATOR_LAYERS,
    }

    name: str = "chroma"
    """A named size (chroma) or `custom`."""
    family: str = "chroma"
    approximator_channels: Refused[int] = 64
    """Cosines and sines of level and row, from which a network computes all modulations.
    """
    approximator_hidden_size: Refused[int] = 5120
    """Width of the network that computes the modulations."""
    approximator_layers: Refused[int] = 5
    """Layers of the network that computes the modulations."""

    def own_sizes(self) -> list[Rule]:
        channels = self.approximator_channels
        return [
            *DoubleSingleConfig.own_sizes(self),
            *at_least_one(self, "approximator_hidden_size", "approximator_layers"),
            (
                channels >= 4 and channels % 4 == 0,
                f"approximator_channels={channels} must be a multiple of 4: a quarter is of the"
                " level, a quarter of the guidance, half of the row",
            ),
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to}: Chroma attends to the one row of padding that"
                " `data_prep --processor chroma` stores; set it to null",
            ),
        ]

    @property
    def modulation_rows(self) -> int:
        """Scales, shifts and gates of all layers and of the head, each of the model's width."""
        return 3 * self.num_single_layers + 12 * self.num_layers + 2
