"""The fields, named sizes and rules of the family `sd3`: Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig, Precision, TextPadding
from dit.config.checks import Rule, at_least_one
from dit.config.resume import Refused

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "sd3": {},
    "sd3.5_medium": {"qk_norm": True, "dual_attention_layers": 13, "max_size": (1, 768, 768)},
    "sd3.5_large": {
        "qk_norm": True,
        "num_layers": 38,
        "hidden_size": 2432,
        "num_attention_heads": 38,
    },
}
"""What each `model.name` sets: Diffusers' scripts/convert_sd3_to_diffusers.py."""
_TINY = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "in_channels": 4,
    "crossattn_emb_size": 16,
    "pooled_size": 10,
    "max_size": (1, 24, 24),
    "sample_size": 16,
    "text_pad_to": TextPadding.STORED,
    "precision": Precision.FP32,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "sd3": _TINY,
    "sd3.5_medium": _TINY | {"dual_attention_layers": 1},
}
"""Named size -> what makes it tiny (`Family.tiny`). 3.5 large has no layer that medium lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd3Config(ModelConfig):
    """The network: sizes, positions, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {
        "pooled_size": 2**20,
        "max_size": 2**12,
        "sample_size": 2**12,
    }
    takes_stored_padding: ClassVar[bool] = True

    name: str = "sd3"
    """A named size (sd3, sd3.5_medium, sd3.5_large) or `custom`."""
    family: str = "sd3"
    num_layers: int = 24
    """Double-stream layers: latents and text have weights of their own, and attention over both."""
    hidden_size: int = 1536
    num_attention_heads: int = 24
    crossattn_emb_size: int = 4096
    text_pad_to: TextPadding | None = None
    """stored: shards hold the states of padding, which published weights attend to; null: none."""
    pooled_size: Refused[int] = 2048
    """Width of `pooled_text`, the concatenated outputs of two CLIP encoders for a caption."""
    qk_norm: Refused[bool] = False
    """Whether queries and keys are normalised (3.5)."""
    dual_attention_layers: Refused[int] = 0
    """First layers with a second attention, among latents only (3.5 medium: 13)."""
    max_size: Refused[tuple[int, int, int]] = (1, 384, 384)
    """Latent frames (1), rows and columns that the table of positions covers; a square."""
    sample_size: Refused[int] = 128
    """A new table has positions from 0 to this number of latent rows, divided by the patch."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        frames, rows, columns = self.max_size
        return [
            *at_least_one(self, "pooled_size", "sample_size"),
            (
                0 <= self.dual_attention_layers <= max(self.num_layers, 0),
                f"dual_attention_layers={self.dual_attention_layers} must lie in"
                f" [0, {self.num_layers}], the number of layers",
            ),
            (
                frames == 1 and rows == columns >= 1,
                f"max_size={list(self.max_size)} must be [1, N, N]: the table of positions is a"
                " square, of pictures",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        return [
            (
                self.patch_temporal == 1,
                f"patch_temporal={self.patch_temporal}: SD3 learns pictures; set it to 1",
            ),
            (
                self.max_size[1] % self.patch_spatial == 0,
                f"max_size={list(self.max_size)} does not divide into patches of"
                f" patch_spatial={self.patch_spatial}",
            ),
            (
                self.sample_size >= self.patch_spatial,
                f"sample_size={self.sample_size} is less than one patch of"
                f" patch_spatial={self.patch_spatial}",
            ),
            (
                self.hidden_size % 4 == 0,
                f"hidden_size={self.hidden_size} does not divide by 4, and the table of positions"
                " has sines and cosines of rows and of columns",
            ),
        ]

    @property
    def table_side(self) -> int:
        """Rows and columns of the table of positions, in tokens."""
        return self.max_size[1] // self.patch_spatial

    @property
    def stack_layers(self) -> dict[str, int]:
        """Layers by stack, in their order; the last layer is one of its own."""
        dual = min(self.dual_attention_layers, self.num_layers - 1)
        counts = {"dual_blocks": dual, "blocks": self.num_layers - 1 - dual, "last_block": 1}
        return {name: count for name, count in counts.items() if count}

    @property
    def largest_latent(self) -> tuple[int, int, int] | None:
        return self.max_size

    @property
    def cost_sizes(self) -> list[int]:
        sizes = ModelConfig.cost_sizes.fget(self)  # type: ignore[attr-defined]
        return [*sizes, self.crossattn_emb_size, self.dual_attention_layers]
