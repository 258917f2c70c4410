"""The family `hunyuan_video_15`, HunyuanVideo 1.5: its fields, sizes, rules, inputs, layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.models.family import (
    TINY_NETWORK,
    Family,
    InputKind,
    NullInput,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    text_input,
)
from dit.models.joint.family import (
    ADALN_ZERO,
    EVEN_STEPS,
    JOINT_PARTS,
    attends_to_no_padding,
    axes_fill_heads,
    double_layer,
    even_axes,
    glyph_input,
    joint_layer_parts,
)
from dit.models.layer_spec import (
    MOST_REFINER_LAYERS,
    NetworkSpec,
    StackSpec,
)
from dit.models.registry import imported

IMAGE, FIRST_FRAME = "image_embed", "first_frame_latent"

MODEL_SIZES: dict[str, dict[str, Any]] = {"hunyuanvideo_15": {}}
"""Fields of `model` by size name; the network does both text-to-video and image-to-video."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "hunyuanvideo_15": {
        **TINY_NETWORK,
        "hidden_size": 64,
        "mlp_ratio": 2.0,
        "crossattn_emb_size": 24,
        "glyph_embed_size": 20,
        "glyph_hidden_size": 32,
        "image_embed_size": 12,
        "patch_spatial": 2,
        "num_refiner_layers": 1,
        "rope_axes": (4, 4, 8),
    }
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Config(ModelConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "hunyuanvideo_15"
    """A named size (hunyuanvideo_15) or `custom`."""
    family: str = "hunyuan_video_15"
    num_layers: int = 54
    hidden_size: int = 2048
    num_attention_heads: int = 16
    """Number of attention heads, in the layers over latents and text and in the caption refiner."""
    in_channels: int = 32
    patch_spatial: int = 1
    crossattn_emb_size: int = 3584
    glyph_embed_size: int = bounded(1472, most=2**20)
    """Width of `text_2`, ByT5's states of words in quotation marks."""
    glyph_hidden_size: int = bounded(2048, most=2**20)
    """Hidden width of the layers that embed `text_2`; Diffusers' class always has 2048."""
    image_embed_size: int = bounded(1152, most=2**20)
    """Width of `image_embed`, SigLIP's states of a given first frame."""
    num_refiner_layers: int = bounded(2, most=MOST_REFINER_LAYERS)
    """Number of attention layers among the tokens of a caption, before all other layers."""
    rope_axes: tuple[int, int, int] = bounded((16, 56, 56), most=2**20, least=None)
    """Widths of a head rotated by frame, row and column; their sum is the head's width."""
    use_meanflow: bool = False
    """Whether the network was distilled to few steps and also gets the timestep at which a step
    ends; such a network cannot be trained."""
    target_size: int = bounded(640, most=2**20)
    """Square root of the area, in pixels, of the videos that pipelines generate by default (720p:
    960)."""

    def own_sizes(self) -> list[Rule]:
        return [
            even_axes(self),
            attends_to_no_padding(self, "HunyuanVideo 1.5"),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self)]

    @property
    def condition_channels(self) -> int:
        """Number of input channels besides the noisy latent: the given frames, then their mask."""
        return self.in_channels + 1

    @property
    def input_features(self) -> int:
        """Number of input features of a token."""
        return (self.in_channels + self.condition_channels) * self.patch_volume


def _inputs(model: HunyuanVideo15Config) -> tuple[SampleInput, ...]:
    return (
        text_input(model, encoder="hunyuan"),
        glyph_input(model, encoder="hunyuan"),
        SampleInput(
            name=IMAGE,
            kind=InputKind.TEXT,
            width=model.image_embed_size,
            required=False,
            may_be_empty=True,
            null=NullInput.KEPT,
            pictures=1,
        ),
        SampleInput(
            name=FIRST_FRAME,
            kind=InputKind.FRAME_CHANNELS,
            width=model.in_channels,
            required=False,
            pictures=1,
        ),
    )


def hunyuan_video_15_stack(model: HunyuanVideo15Config) -> StackSpec:
    """The specification of the double-stream layers."""
    layer = double_layer(**joint_layer_parts(model))
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


FAMILY = Family(
    name="hunyuan_video_15",
    config=HunyuanVideo15Config,
    network=imported("dit.models.hunyuan_video_15.model:HunyuanVideo15Network"),
    spec=lambda model: NetworkSpec(stacks=(hunyuan_video_15_stack(model),)),
    parts={**JOINT_PARTS, "text": "text"},
    diffusers=imported("dit.models.hunyuan_video_15.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # indices of frames, independent of the frame rate
    weights=WeightRules(zero=ADALN_ZERO, no_decay=("text.kind",)),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={"hunyuanvideo_15": {"flow_shift": 5.0}},  # of the published scheduler at 480p
        clean_level=None,
    ),
    tells_step_end=lambda model: model.use_meanflow,
    vae=lambda _: "hunyuan",
    tiny=TINY,
)
