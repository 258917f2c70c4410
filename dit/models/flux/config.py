"""The fields, named sizes and rules of the family `flux`: FLUX.1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig, Precision, TextPadding
from dit.config.checks import Rule, at_least_one
from dit.models.joint_family import axes_fill_heads, even_axes, heads_share_mlp

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
class FluxConfig(ModelConfig):
    """The network: sizes, conditions, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {
        "num_single_layers": 2**14,
        "pooled_size": 2**20,
        "rope_axes": 2**17,
        "reference_latents": _MOST_REFERENCES,
    }
    takes_stored_padding: ClassVar[bool] = True
    shown_before: ClassVar[Mapping[str, str]] = {"num_single_layers": "hidden_size"}

    name: str = "flux1_dev"
    """A named size (flux1_dev, flux1_schnell, flux1_kontext) or `custom`."""
    family: str = "flux"
    num_layers: int = 19
    """Double-stream layers: latents and text have weights of their own, and attention over both."""
    num_single_layers: int = 38
    """Single-stream layers after them, on one row of latents and text."""
    hidden_size: int = 3072
    num_attention_heads: int = 24
    """Heads of attention over latents and text."""
    crossattn_emb_size: int = 4096
    text_pad_to: TextPadding | None = None
    """stored: shards hold the states of padding, which published weights attend to; null: none."""
    pooled_size: int = 768
    """Width of `pooled_text`, what a second text encoder makes of a caption (CLIP-L: 768)."""
    guidance_embed: bool = True
    """Whether the network is told a guidance scale, `objective.guidance` (distilled: dev)."""
    rope_axes: tuple[int, int, int] = (16, 56, 56)
    """Numbers of a head that turn with frame or reference, row and column; they add up to it."""
    reference_latents: int = 0
    """Reference pictures that a sample may have, as tokens beside its own (Kontext: 1)."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        return [
            *at_least_one(self, "num_single_layers", "pooled_size"),
            (
                self.reference_latents >= 0,
                f"reference_latents={self.reference_latents} must not be negative",
            ),
            even_axes(self),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self), heads_share_mlp(self)]

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.num_single_layers

    @property
    def cost_sizes(self) -> list[int]:
        sizes = ModelConfig.cost_sizes.fget(self)  # type: ignore[attr-defined]
        return [*sizes, self.num_single_layers, self.crossattn_emb_size, self.input_features]

    @property
    def input_features(self) -> int:
        """Numbers in one token of what the network is fed."""
        return self.patch_features
