"""The fields, named sizes and rules of the family `flux`: FLUX.1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import Precision, TextPadding
from dit.config.checks import Rule, at_least_one
from dit.config.resume import Refused
from dit.models.joint.config import DoubleSingleConfig

_MOST_REFERENCES = 64

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "flux1_dev": {},
    "flux1_schnell": {"guidance_embed": False},
    "flux1_kontext": {"reference_latents": 1},
}
"""What each `model.name` sets: Diffusers' scripts/convert_flux_to_diffusers.py."""
_TINY = {
    "num_layers": 4,
    "num_single_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "in_channels": 4,
    "crossattn_emb_size": 16,
    "pooled_size": 10,
    "rope_axes": (4, 4, 4),
    "text_pad_to": TextPadding.STORED,
    "precision": Precision.FP32,
}
TINY: Mapping[str, Mapping[str, Any]] = {"flux1_schnell": _TINY, "flux1_kontext": _TINY}
"""Named size -> what makes it tiny (`Family.tiny`). A network of dev is one of kontext."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxConfig(DoubleSingleConfig):
    """The network: sizes, conditions, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {
        **DoubleSingleConfig.most,
        "pooled_size": 2**20,
        "reference_latents": _MOST_REFERENCES,
    }
    takes_stored_padding: ClassVar[bool] = True

    name: str = "flux1_dev"
    """A named size (flux1_dev, flux1_schnell, flux1_kontext) or `custom`."""
    family: str = "flux"
    text_pad_to: TextPadding | None = None
    """stored: shards hold the states of padding, which published weights attend to; null: none."""
    pooled_size: Refused[int] = 768
    """Width of `pooled_text`, a second text encoder's output for a caption (CLIP-L: 768)."""
    guidance_embed: Refused[bool] = True
    """Whether the network gets a guidance scale, `objective.guidance` (distilled: dev)."""
    reference_latents: Refused[int] = 0
    """Reference pictures that a sample may have, as tokens beside its own (Kontext: 1)."""

    def own_sizes(self) -> list[Rule]:
        return [
            *DoubleSingleConfig.own_sizes(self),
            *at_least_one(self, "pooled_size"),
            (
                self.reference_latents >= 0,
                f"reference_latents={self.reference_latents} must not be negative",
            ),
        ]
