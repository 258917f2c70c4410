"""The family `hunyuan_video`, the first HunyuanVideo: its fields, sizes, rules, layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from dit.config.checks import Rule, bounded
from dit.models.family import (
    GUIDANCE,
    Family,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    guidance_told,
    pooled_input,
    text_input,
)
from dit.models.joint.family import (
    ADALN_ZERO,
    EVEN_STEPS,
    JOINT_PARTS,
    TINY_DOUBLE_SINGLE,
    DoubleSingleConfig,
    attends_to_no_padding,
    double_then_single,
)
from dit.models.layer_spec import (
    MOST_REFINER_LAYERS,
    NetworkSpec,
)
from dit.models.registry import imported

FIRST_FRAME = "first_frame_latent"


class FirstFrame(StrEnum):
    """How the network gets a given first frame; the values are those of Diffusers."""

    NONE = "none"  # not at all: text-to-video
    LATENT_CONCAT = "latent_concat"  # in additional channels, with a mask
    TOKEN_REPLACE = "token_replace"  # instead of the noisy first frame, with timestep 0


MODEL_SIZES: dict[str, dict[str, Any]] = {
    "hunyuanvideo": {},
    "hunyuanvideo_i2v": {"image_condition": FirstFrame.TOKEN_REPLACE},
    "hunyuanvideo_i2v_33ch": {
        "image_condition": FirstFrame.LATENT_CONCAT,
        "guidance_embed": False,
    },
}
"""Fields of `model` by size name, from Diffusers' scripts/convert_hunyuan_video_to_diffusers.py."""
_TINY = {
    **TINY_DOUBLE_SINGLE,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "crossattn_emb_size": 24,
    "pooled_size": 12,
    "num_refiner_layers": 1,
    "rope_axes": (4, 4, 8),
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "hunyuanvideo_i2v": _TINY,
    "hunyuanvideo_i2v_33ch": _TINY,
}
"""Keys of `model` for tiny networks (`Family.tiny`). `hunyuanvideo` has no entry: its network is
that of `hunyuanvideo_i2v` for samples without a given frame."""


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoConfig(DoubleSingleConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "hunyuanvideo"
    """A named size (hunyuanvideo, hunyuanvideo_i2v, hunyuanvideo_i2v_33ch) or `custom`."""
    family: str = "hunyuan_video"
    num_layers: int = 20
    num_single_layers: int = 40
    num_attention_heads: int = 24
    """Number of attention heads, in the layers over latents and text and in the caption refiner."""
    num_refiner_layers: int = bounded(2, most=MOST_REFINER_LAYERS)
    """Number of attention layers among the tokens of a caption, before all other layers."""
    pooled_size: int = bounded(768, most=2**20)
    """Width of `pooled_text`, a second text encoder's output for a caption (CLIP-L: 768)."""
    guidance_embed: bool = True
    """Whether the network gets a guidance scale, `objective.guidance`."""
    image_condition: FirstFrame = FirstFrame.NONE
    """How the network gets a given first frame: none, latent_concat or token_replace."""

    def own_sizes(self) -> list[Rule]:
        return [
            *super().own_sizes(),
            attends_to_no_padding(self, "HunyuanVideo"),
        ]

    @property
    def cost_sizes(self) -> list[int]:
        # Stored states of loaders contain these numbers in this order.
        sizes = super().cost_sizes
        return [*sizes[:-2], self.num_refiner_layers, *sizes[-2:]]

    @property
    def condition_channels(self) -> int:
        """Number of input channels besides the noisy latent: the given frames, then their mask."""
        shown = self.image_condition is FirstFrame.LATENT_CONCAT
        return self.in_channels + 1 if shown else 0

    @property
    def input_features(self) -> int:
        """Number of input features of a token."""
        return (self.in_channels + self.condition_channels) * self.patch_volume


_KINDS = {
    FirstFrame.LATENT_CONCAT: InputKind.FRAME_CHANNELS,
    FirstFrame.TOKEN_REPLACE: InputKind.FRAMES,
}


def _codec(model: HunyuanVideoConfig) -> str:
    """The name in `dit.codecs` of the VAE and the text encoder of the published weights.

    With a given first frame the text encoder, Llava, also sees that frame.
    """
    return "hunyuanvideo" if model.image_condition is FirstFrame.NONE else "hunyuanvideo_i2v"


def _inputs(model: HunyuanVideoConfig) -> tuple[SampleInput, ...]:
    encoder = _codec(model)
    inputs = (text_input(model, encoder=encoder), pooled_input(model, encoder=encoder))
    kind = _KINDS.get(model.image_condition)
    if kind is None:
        return inputs
    first: Any = {"width": model.in_channels, "required": False, "pictures": 1}
    return (*inputs, SampleInput(name=FIRST_FRAME, kind=kind, **first))


FAMILY = Family(
    name="hunyuan_video",
    config=HunyuanVideoConfig,
    network=imported("dit.models.hunyuan_video.model:HunyuanVideoNetwork"),
    spec=lambda model: NetworkSpec(stacks=double_then_single(model)),
    parts={**JOINT_PARTS, "refiner": "text", "single_blocks": "single"},
    diffusers=imported("dit.models.hunyuan_video.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # indices of frames, independent of the frame rate
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={
            "hunyuanvideo": {"guidance": GUIDANCE, "flow_shift": 7.0},
            "hunyuanvideo_i2v": {"guidance": GUIDANCE, "flow_shift": 7.0},
            "hunyuanvideo_i2v_33ch": {"guidance": None, "flow_shift": 7.0},
        },
    ),
    guidance=guidance_told(),
    vae=_codec,
    tiny=TINY,
)
