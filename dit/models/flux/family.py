"""The family `flux`, FLUX.1: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import TextPadding
from dit.config.checks import bounded
from dit.config.resume import OfInputs
from dit.models.family import (
    GUIDANCE,
    Family,
    HasGuidance,
    HasReferences,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    guidance_told,
    pooled_input,
    reference_inputs,
    text_input,
)
from dit.models.joint.family import (
    ADALN_ZERO,
    EVEN_STEPS,
    JOINT_PARTS,
    TINY_DOUBLE_SINGLE,
    DoubleSingleConfig,
    double_then_single,
)
from dit.models.layer_spec import NetworkSpec
from dit.models.registry import imported

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "flux1_dev": {},
    "flux1_schnell": {"guidance_embed": False},
    "flux1_kontext": {"reference_latents": 1},
}
"""Fields of `model` by size name, from Diffusers' scripts/convert_flux_to_diffusers.py."""
_TINY = {
    **TINY_DOUBLE_SINGLE,
    "hidden_size": 48,
    "crossattn_emb_size": 16,
    "pooled_size": 10,
    "rope_axes": (4, 4, 4),
    "text_pad_to": TextPadding.STORED,
}
TINY: Mapping[str, Mapping[str, Any]] = {"flux1_schnell": _TINY, "flux1_kontext": _TINY}
"""Keys of `model` for the tiny network of each size (`Family.tiny`). `flux1_dev` has no entry: its
network is that of `flux1_kontext` without references."""


@dataclass(frozen=True, kw_only=True)
class FluxConfig(HasReferences, HasGuidance, DoubleSingleConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    takes_stored_padding: ClassVar[bool] = True
    shown_before: ClassVar[Mapping[str, str]] = {
        **DoubleSingleConfig.shown_before,
        "pooled_size": "guidance_embed",
    }

    name: str = "flux1_dev"
    """A named size (flux1_dev, flux1_schnell, flux1_kontext) or `custom`."""
    family: str = "flux"
    text_pad_to: TextPadding | None = None
    """How captions are padded: stored (shards hold the encoder's states of padding, which published
    weights attend to), or null (not at all)."""
    pooled_size: int = bounded(768, most=2**20)
    """Width of `pooled_text`, a second text encoder's output for a caption (CLIP-L: 768)."""
    guidance_embed: bool = True
    """Whether the network gets a guidance scale, `objective.guidance` (dev, which is distilled)."""
    reference_latents: OfInputs[int] = 0
    """Largest number of reference pictures of a sample, which become additional tokens (Kontext:
    1)."""


def _inputs(model: FluxConfig) -> tuple[SampleInput, ...]:
    return (
        text_input(model, encoder="flux", may_be_empty=True),
        pooled_input(model, encoder="flux"),
        *reference_inputs(model, clean=False),
    )


# In the published pipelines of dev and Kontext the shift depends on the number of tokens.
_DISTILLED = {"guidance": GUIDANCE, "time_shift_type": "exponential"}

FAMILY = Family(
    name="flux",
    config=FluxConfig,
    network=imported("dit.models.flux.model:FluxNetwork"),
    spec=lambda model: NetworkSpec(stacks=double_then_single(model)),
    parts={**JOINT_PARTS, "single_blocks": "single"},
    diffusers=imported("dit.models.flux.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # a picture has frame 0, its references 1, 2, ...
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={
            "flux1_dev": _DISTILLED,
            "flux1_schnell": {"guidance": None, "time_shift_type": None},
            "flux1_kontext": _DISTILLED,
        },
        clean_level=None,
    ),
    guidance=guidance_told(),
    vae=lambda _: "flux",
    distilled=("flux1_schnell",),
    tiny=TINY,
)
