"""The fields, named sizes and rules of the family `hunyuan_video`: the first HunyuanVideo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from dit.config import Precision
from dit.config.checks import Rule, at_least_one
from dit.config.resume import Refused
from dit.models.joint.family import DoubleSingleConfig, attends_to_no_padding
from dit.models.layer_spec import MOST_REFINER_LAYERS


class FirstFrame(StrEnum):
    """How the network is shown a given first frame, in Diffusers' words."""

    NONE = "none"  # text-to-video
    LATENT_CONCAT = "latent_concat"  # in channels beside the noisy ones, with a mask
    TOKEN_REPLACE = "token_replace"  # in the place of the noisy one, and told level 0


MODEL_SIZES: dict[str, dict[str, Any]] = {
    "hunyuanvideo": {},
    "hunyuanvideo_i2v": {"image_condition": FirstFrame.TOKEN_REPLACE},
    "hunyuanvideo_i2v_33ch": {
        "image_condition": FirstFrame.LATENT_CONCAT,
        "guidance_embed": False,
    },
}
"""What each `model.name` sets: Diffusers' scripts/convert_hunyuan_video_to_diffusers.py."""
_TINY = {
    "num_layers": 4,
    "num_single_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "mlp_ratio": 2.0,
    "in_channels": 4,
    "crossattn_emb_size": 24,
    "pooled_size": 12,
    "num_refiner_layers": 1,
    "rope_axes": (4, 4, 8),
    "precision": Precision.FP32,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "hunyuanvideo_i2v": _TINY,
    "hunyuanvideo_i2v_33ch": _TINY,
}
"""Named size -> what makes it tiny (`Family.tiny`). That of text is the first without a frame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HunyuanVideoConfig(DoubleSingleConfig):
    """The network: sizes, conditions, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    most: ClassVar[Mapping[str, float]] = {
        **DoubleSingleConfig.most,
        "num_refiner_layers": MOST_REFINER_LAYERS,
        "pooled_size": 2**20,
    }

    name: str = "hunyuanvideo"
    """A named size (hunyuanvideo, hunyuanvideo_i2v, hunyuanvideo_i2v_33ch) or `custom`."""
    family: str = "hunyuan_video"
    num_layers: int = 20
    num_single_layers: int = 40
    num_attention_heads: int = 24
    """Heads of attention over latents and text, and of the layers that refine the caption."""
    num_refiner_layers: Refused[int] = 2
    """Attention layers among the tokens of a caption, before all other layers."""
    pooled_size: Refused[int] = 768
    """Width of `pooled_text`, a second text encoder's output for a caption (CLIP-L: 768)."""
    guidance_embed: Refused[bool] = True
    """Whether the network gets a guidance scale, `objective.guidance`."""
    image_condition: Refused[FirstFrame] = FirstFrame.NONE
    """How a first frame is given: none, latent_concat or token_replace."""

    def own_sizes(self) -> list[Rule]:
        return [
            *DoubleSingleConfig.own_sizes(self),
            *at_least_one(self, "num_refiner_layers", "pooled_size"),
            attends_to_no_padding(self, "HunyuanVideo"),
        ]

    @property
    def cost_sizes(self) -> list[int]:
        # Stored loader states have them in this order.
        sizes = DoubleSingleConfig.cost_sizes.fget(self)  # type: ignore[attr-defined]
        return [*sizes[:-2], self.num_refiner_layers, *sizes[-2:]]

    @property
    def condition_channels(self) -> int:
        """Channels beside the noisy ones: those of given frames, then the mask of these frames."""
        shown = self.image_condition is FirstFrame.LATENT_CONCAT
        return self.in_channels + 1 if shown else 0

    @property
    def input_features(self) -> int:
        """Numbers in one token of what the network is fed."""
        return (self.in_channels + self.condition_channels) * self.patch_volume
