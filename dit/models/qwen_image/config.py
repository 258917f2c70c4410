"""The fields, named sizes and rules of the family `qwen_image`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig, Precision
from dit.config.checks import Rule
from dit.config.resume import Refused
from dit.models.joint.family import attends_to_no_padding, axes_fill_heads, even_axes

MOST_REFERENCES = 3
"""Pictures that a sample may bring to be edited; `QwenImageEditPlusPipeline` knows no bound."""

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "qwen_image": {},
    "qwen_image_edit": {"reference_latents": 1},
    "qwen_image_edit_2511": {"reference_latents": MOST_REFERENCES, "clean_references": True},
}
_TINY = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "mlp_ratio": 2.0,
    "in_channels": 4,
    "crossattn_emb_size": 24,
    "rope_axes": (4, 4, 8),
    "precision": Precision.FP32,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen_image": _TINY,
    "qwen_image_edit_2511": _TINY | {"reference_latents": 1},
}
"""Named size -> what makes it tiny (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenImageConfig(ModelConfig):
    """The network: sizes, positions, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {"rope_axes": 2**20}

    name: str = "qwen_image"
    """A named size (qwen_image, qwen_image_edit, qwen_image_edit_2511) or `custom`."""
    family: str = "qwen_image"
    num_layers: int = 60
    hidden_size: int = 3072
    num_attention_heads: int = 24
    crossattn_emb_size: int = 3584
    rope_axes: Refused[tuple[int, int, int]] = (16, 56, 56)
    """Even widths of a head rotated by picture, row and column; their sum is a head's width."""
    reference_latents: Refused[int] = 0
    """Pictures to edit that a sample may have, as latents of any size; at most 3."""
    clean_references: Refused[bool] = False
    """Whether pictures to edit get noise level 0 (2511) instead of the level of the sample."""

    def own_sizes(self) -> list[Rule]:
        count = self.reference_latents
        return [
            (
                0 <= count <= MOST_REFERENCES,
                f"reference_latents={count} must lie in [0, {MOST_REFERENCES}]",
            ),
            (
                not self.clean_references or count > 0,
                "clean_references=true needs reference_latents of 1 or more; set it to false",
            ),
            even_axes(self),
        ]

    def own_shapes(self) -> list[Rule]:
        return [
            axes_fill_heads(self),
            attends_to_no_padding(self, "Qwen-Image"),
            (
                self.patch_temporal == 1,
                f"patch_temporal={self.patch_temporal}: Qwen-Image learns pictures; set it to 1",
            ),
        ]
