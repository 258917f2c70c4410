"""The fields, named sizes and rules of the family `hunyuan_video_15`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig, Precision
from dit.config.checks import Rule, at_least_one
from dit.config.resume import Refused
from dit.models.joint.family import attends_to_no_padding, axes_fill_heads, even_axes
from dit.models.layer_spec import MOST_REFINER_LAYERS

MODEL_SIZES: dict[str, dict[str, Any]] = {"hunyuanvideo_15": {}}
"""One network makes video of text, and of text and a first frame."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "hunyuanvideo_15": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "mlp_ratio": 2.0,
        "in_channels": 4,
        "crossattn_emb_size": 24,
        "glyph_embed_size": 20,
        "glyph_hidden_size": 32,
        "image_embed_size": 12,
        "patch_spatial": 2,
        "num_refiner_layers": 1,
        "rope_axes": (4, 4, 8),
        "precision": Precision.FP32,
    }
}
"""Named size -> what makes it tiny (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HunyuanVideo15Config(ModelConfig):
    """The network: sizes, conditions, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {
        "glyph_embed_size": 2**20,
        "glyph_hidden_size": 2**20,
        "image_embed_size": 2**20,
        "num_refiner_layers": MOST_REFINER_LAYERS,
        "rope_axes": 2**20,
        "target_size": 2**20,
    }

    name: str = "hunyuanvideo_15"
    """A named size (hunyuanvideo_15) or `custom`."""
    family: str = "hunyuan_video_15"
    num_layers: int = 54
    hidden_size: int = 2048
    num_attention_heads: int = 16
    """Heads of attention over latents and text, and of the layers that refine the caption."""
    in_channels: int = 32
    patch_spatial: int = 1
    crossattn_emb_size: int = 3584
    glyph_embed_size: Refused[int] = 1472
    """Width of `text_2`, ByT5's output for words in quotation marks."""
    glyph_hidden_size: Refused[int] = 2048
    """Width of the first layers that process `text_2`; Diffusers has 2048."""
    image_embed_size: Refused[int] = 1152
    """Width of `image_embed`, SigLIP's output for a given first frame."""
    num_refiner_layers: Refused[int] = 2
    """Attention layers among the tokens of a caption, before all other layers."""
    rope_axes: Refused[tuple[int, int, int]] = (16, 56, 56)
    """Widths of a head rotated by frame, row and column; their sum is the width of the head."""
    use_meanflow: Refused[bool] = False
    """Whether it was distilled to few steps and gets the end of each; it cannot be trained."""
    target_size: Refused[int] = 640
    """Square root of the area, in pixels, of what pipelines make by default (720p: 960)."""

    def own_sizes(self) -> list[Rule]:
        widths = ("glyph_embed_size", "glyph_hidden_size", "image_embed_size")
        return [
            *at_least_one(self, *widths, "num_refiner_layers", "target_size"),
            even_axes(self),
            attends_to_no_padding(self, "HunyuanVideo 1.5"),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self)]

    @property
    def condition_channels(self) -> int:
        """Channels beside the noisy ones: those of given frames, then the mask of these frames."""
        return self.in_channels + 1

    @property
    def input_features(self) -> int:
        """Numbers in one token of what the network is fed."""
        return (self.in_channels + self.condition_channels) * self.patch_volume
