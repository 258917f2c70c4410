"""The family `hunyuan_image`, HunyuanImage 2.1: its fields, sizes, rules, layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config.checks import Rule, bounded
from dit.models.family import (
    Family,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    guidance_told,
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
    glyph_input,
    learns_pictures,
)
from dit.models.layer_spec import (
    MOST_REFINER_LAYERS,
    NetworkSpec,
)
from dit.models.registry import imported

_ENCODER = "hunyuanimage"
GUIDANCE = 3.25
"""Guidance scale of the published distilled network: `distilled_guidance_scale` of its pipeline."""

MOST_SIDE = 2**20

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "hunyuanimage_21": {},
    "hunyuanimage_21_distilled": {"guidance_embed": True, "use_meanflow": True},
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "hunyuanimage_21": {
        **TINY_DOUBLE_SINGLE,
        "hidden_size": 64,
        "mlp_ratio": 2.0,
        "crossattn_emb_size": 24,
        "glyph_embed_size": 20,
        "glyph_hidden_size": 32,
        "patch_spatial": 2,
        "num_refiner_layers": 1,
        "rope_axes": (8, 8),
    }
}
"""Keys of `model` for tiny networks (`Family.tiny`); none for the distilled network, which cannot
be trained."""


@dataclass(frozen=True, kw_only=True)
class HunyuanImageConfig(DoubleSingleConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "hunyuanimage_21"
    """A named size (hunyuanimage_21, hunyuanimage_21_distilled) or `custom`."""
    family: str = "hunyuan_image"
    num_layers: int = 20
    num_single_layers: int = 40
    hidden_size: int = 3584
    num_attention_heads: int = 28
    """Number of attention heads, in the layers over latents and text and in the caption refiner."""
    in_channels: int = 64
    patch_spatial: int = 1
    crossattn_emb_size: int = 3584
    glyph_embed_size: int = bounded(1472, most=2**20)
    """Width of `text_2`, ByT5's states of words in quotation marks."""
    glyph_hidden_size: int = bounded(2048, most=2**20)
    """Hidden width of the layers that embed `text_2`; Diffusers' class always has 2048."""
    num_refiner_layers: int = bounded(2, most=MOST_REFINER_LAYERS)
    """Number of attention layers among the tokens of a caption, before all other layers."""
    rope_axes: tuple[int, int] = (64, 64)  # type: ignore[assignment]  # pictures have no frames
    """Widths of a head rotated by row and by column; their sum is the head's width."""
    guidance_embed: bool = False
    """Whether the network gets a guidance scale, `objective.guidance` (the distilled network)."""
    use_meanflow: bool = False
    """Whether the network was distilled to few steps and also gets the timestep at which a step
    ends; such a network cannot be trained."""

    def own_sizes(self) -> list[Rule]:
        return [
            *super().own_sizes(),
            attends_to_no_padding(self, "HunyuanImage"),
            learns_pictures(self, "HunyuanImage"),
        ]

    @property
    def largest_latent(self) -> tuple[int, int, int]:
        """Largest latent (frames, rows, columns): one frame of nearly any size."""
        return (1, MOST_SIDE, MOST_SIDE)

    @property
    def cost_sizes(self) -> list[int]:
        # Stored states of loaders contain these numbers without the last one.
        sizes = super().cost_sizes
        return sizes[:-1]


def _inputs(model: HunyuanImageConfig) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder=_ENCODER), glyph_input(model, encoder=_ENCODER))


FAMILY = Family(
    name="hunyuan_image",
    config=HunyuanImageConfig,
    network=imported("dit.models.hunyuan_image.model:HunyuanImageNetwork"),
    spec=lambda model: NetworkSpec(stacks=double_then_single(model)),
    parts={**JOINT_PARTS, "refiner": "text", "glyphs": "text", "single_blocks": "single"},
    diffusers=imported("dit.models.hunyuan_image.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # the frame is always 0 and rotates nothing
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={
            # The shift is the default of sd-scripts.
            "hunyuanimage_21": {"guidance": None, "flow_shift": 5.0},
            "hunyuanimage_21_distilled": {"guidance": GUIDANCE, "flow_shift": 5.0},
        },
        clean_level=None,
    ),
    guidance=guidance_told(GUIDANCE),
    tells_step_end=lambda model: model.use_meanflow,
    vae=lambda _: _ENCODER,
    tiny=TINY,
)
