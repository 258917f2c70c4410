"""The family `flux2`, FLUX.2: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from dit.config import TextPadding
from dit.models.family import (
    GUIDANCE,
    Family,
    HasGuidance,
    HasReferences,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    guidance_told,
    reference_inputs,
    text_input,
    time_offset_positions,
)
from dit.models.joint.family import (
    JOINT_PARTS,
    TINY_DOUBLE_SINGLE,
    DoubleSingleConfig,
    double_then_single,
)
from dit.models.layer_spec import (
    Activation,
    NetworkSpec,
    SharedModulation,
    StackSpec,
)
from dit.models.registry import imported

VECTORS: Mapping[str, int] = {"latents": 6, "text": 6, "single": 3, "out": 2}
"""Number of modulation vectors of double-stream layers (for latents and for text), of single-stream
layers, and of the head."""
FIRST_OF_TEXT, FIRST_OF_SINGLE, FIRST_OF_HEAD, ALL_VECTORS = accumulate(VECTORS.values())
THETA = 2000.0
"""Base of the rotary frequencies."""

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "flux2_dev": {},
    "flux2_klein_4b": {
        "num_layers": 5,
        "num_single_layers": 20,
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "crossattn_emb_size": 7680,
        "guidance_embed": False,
    },
    "flux2_klein_9b": {
        "num_single_layers": 24,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "crossattn_emb_size": 12288,
        "guidance_embed": False,
    },
}
"""Fields of `model` by size name, from Diffusers' scripts/convert_flux2_to_diffusers.py."""
OWN_MASK = "references that attend only to themselves"
"""Feature of the network of `Flux2KleinKVPipeline` that our network lacks."""
_TINY = {
    **TINY_DOUBLE_SINGLE,
    "hidden_size": 48,
    "patch_spatial": 2,
    "crossattn_emb_size": 16,
    "rope_axes": (2, 4, 4, 2),
    "text_pad_to": TextPadding.STORED,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "flux2_dev": {**_TINY, "reference_latents": 1},
    "flux2_klein_4b": _TINY,
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class Flux2Config(HasReferences, HasGuidance, DoubleSingleConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    takes_stored_padding: ClassVar[bool] = True

    name: str = "flux2_dev"
    """A named size (flux2_dev, flux2_klein_4b, flux2_klein_9b) or `custom`."""
    family: str = "flux2"
    num_layers: int = 8
    num_single_layers: int = 48
    hidden_size: int = 6144
    num_attention_heads: int = 48
    mlp_ratio: float = 3.0
    in_channels: int = 128
    patch_spatial: int = 1
    crossattn_emb_size: int = 15360
    rope_axes: tuple[int, int, int, int] = (32, 32, 32, 32)  # type: ignore[assignment]
    """Widths of a head rotated by reference, row, column and index in the text; their sum is the
    head's width."""
    text_pad_to: TextPadding | None = None
    """How captions are padded: stored (shards hold the encoder's states of padding, which published
    weights attend to), or null (not at all)."""
    guidance_embed: bool = True
    """Whether the network gets a guidance scale, `objective.guidance` (dev, which is distilled)."""


def _processor(model: Flux2Config) -> str:
    return "flux2" if model.guidance_embed else "flux2_klein"


def _inputs(model: Flux2Config) -> tuple[SampleInput, ...]:
    return (
        text_input(model, encoder=_processor(model), may_be_empty=True),
        *reference_inputs(model, clean=False),
    )


def flux2_stacks(model: Flux2Config) -> tuple[StackSpec, ...]:
    """The specifications of both stacks; all layers of a stack share their modulations."""
    return double_then_single(
        model,
        latents=SharedModulation(0),
        text=SharedModulation(FIRST_OF_TEXT),
        single=SharedModulation(FIRST_OF_SINGLE),
        fused=True,
        activation=Activation.SWIGLU,
        bias=False,
    )


# The shift in training. Samplers have that of the pipelines, by number of tokens and of steps.
_BY_TOKENS = {"time_shift_type": "exponential"}
_KLEIN = {"guidance": None, **_BY_TOKENS}

FAMILY = Family(
    name="flux2",
    config=Flux2Config,
    network=imported("dit.models.flux2.model:Flux2Network"),
    spec=lambda model: NetworkSpec(stacks=flux2_stacks(model)),
    parts={"modulations.out": "head", **JOINT_PARTS, "single_blocks": "single"},
    diffusers=imported("dit.models.flux2.diffusers:FORM"),
    inputs=_inputs,
    positions=time_offset_positions,
    weights=WeightRules(
        zero=("modulations.*.weight", "proj_out.weight"),  # like `ADALN_ZERO`
    ),
    objective=ObjectiveConventions(
        settings={"name": "flow", "sampling_levels": "empirical"},
        of_size={
            "flux2_dev": {"guidance": GUIDANCE, **_BY_TOKENS},
            "flux2_klein_4b": _KLEIN,
            "flux2_klein_9b": _KLEIN,
        },
        clean_level=None,
    ),
    guidance=guidance_told(),
    refused={"flux2_klein_9b_kv": OWN_MASK},
    vae=_processor,
    tiny=TINY,
)
