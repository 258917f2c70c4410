"""The fields, named sizes and rules of the family `hunyuan_image`: HunyuanImage 2.1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import Precision
from dit.config.checks import Rule, at_least_one
from dit.config.resume import Refused
from dit.models.joint.family import DoubleSingleConfig, attends_to_no_padding
from dit.models.layer_spec import MOST_REFINER_LAYERS

MOST_SIDE = 2**20

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "hunyuanimage_21": {},
    "hunyuanimage_21_distilled": {"guidance_embed": True, "use_meanflow": True},
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "hunyuanimage_21": {
        "num_layers": 4,
        "num_single_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "mlp_ratio": 2.0,
        "in_channels": 4,
        "crossattn_emb_size": 24,
        "glyph_embed_size": 20,
        "glyph_hidden_size": 32,
        "patch_spatial": 2,
        "num_refiner_layers": 1,
        "rope_axes": (8, 8),
        "precision": Precision.FP32,
    }
}
"""Named size -> what makes it tiny (`Family.tiny`); the distilled network is not trained here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HunyuanImageConfig(DoubleSingleConfig):
    """The network: sizes, conditions, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {
        **DoubleSingleConfig.most,
        "glyph_embed_size": 2**20,
        "glyph_hidden_size": 2**20,
        "num_refiner_layers": MOST_REFINER_LAYERS,
    }

    name: str = "hunyuanimage_21"
    """A named size (hunyuanimage_21, hunyuanimage_21_distilled) or `custom`."""
    family: str = "hunyuan_image"
    num_layers: int = 20
    num_single_layers: int = 40
    hidden_size: int = 3584
    num_attention_heads: int = 28
    """Heads of attention over latents and text, and of the layers that refine the caption."""
    in_channels: int = 64
    patch_spatial: int = 1
    crossattn_emb_size: int = 3584
    glyph_embed_size: Refused[int] = 1472
    """Width of `text_2`, ByT5's output for words in quotation marks."""
    glyph_hidden_size: Refused[int] = 2048
    """Width of the first layers that process `text_2`; Diffusers has 2048."""
    num_refiner_layers: Refused[int] = 2
    """Attention layers among the tokens of a caption, before all other layers."""
    rope_axes: tuple[int, int] = (64, 64)  # type: ignore[assignment]  # pictures have no frames
    """Widths of a head rotated by row and column; their sum is the width of the head."""
    guidance_embed: Refused[bool] = False
    """Whether the network gets a guidance scale, `objective.guidance` (distilled)."""
    use_meanflow: Refused[bool] = False
    """Whether it was distilled to few steps and gets the end of each; it cannot be trained."""

    def own_sizes(self) -> list[Rule]:
        return [
            *DoubleSingleConfig.own_sizes(self),
            *at_least_one(self, "glyph_embed_size", "glyph_hidden_size", "num_refiner_layers"),
            attends_to_no_padding(self, "HunyuanImage"),
            (
                self.patch_temporal == 1,
                f"patch_temporal={self.patch_temporal}: HunyuanImage learns pictures; set it to 1",
            ),
        ]

    @property
    def largest_latent(self) -> tuple[int, int, int]:
        """Pictures, whose positions are computed."""
        return (1, MOST_SIDE, MOST_SIDE)

    @property
    def cost_sizes(self) -> list[int]:
        # Stored loader states have them without the last one.
        sizes = DoubleSingleConfig.cost_sizes.fget(self)  # type: ignore[attr-defined]
        return sizes[:-1]
