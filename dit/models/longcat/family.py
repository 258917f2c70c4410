"""The family `longcat`, LongCat-Image: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import TextPadding
from dit.config.checks import Rule
from dit.config.resume import OfInputs
from dit.models.family import (
    Family,
    HasReferences,
    KeptNorm,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    null_text_inputs,
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
    learns_pictures,
)
from dit.models.layer_spec import NetworkSpec
from dit.models.registry import imported

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "longcat_image": {},
    "longcat_image_edit": {"reference_latents": 1},
}
"""Fields of `model` by size name. The default numbers of layers are those of other projects."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "longcat_image_edit": {
        **TINY_DOUBLE_SINGLE,
        "hidden_size": 48,
        "crossattn_emb_size": 16,
        "rope_axes": (2, 4, 6),
        "text_pad_to": TextPadding.STORED,
    }
}
"""Keys of `model` for tiny networks (`Family.tiny`). `longcat_image` has no entry: its network is
that of `longcat_image_edit` without references."""


@dataclass(frozen=True, kw_only=True)
class LongCatConfig(HasReferences, DoubleSingleConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    takes_stored_padding: ClassVar[bool] = True

    name: str = "longcat_image"
    """A named size (longcat_image, longcat_image_edit) or `custom`."""
    family: str = "longcat"
    num_layers: int = 10
    num_single_layers: int = 20
    crossattn_emb_size: int = 3584
    text_pad_to: TextPadding | None = None
    """How captions are padded: stored (shards hold the encoder's states of padding, which published
    weights attend to), or null (not at all)."""
    reference_latents: OfInputs[int] = 0
    """Largest number of pictures to edit in a sample, which become additional tokens (Edit: 1)."""

    def own_sizes(self) -> list[Rule]:
        return [
            *super().own_sizes(),
            learns_pictures(self, "LongCat-Image"),
        ]


def _codec(model: LongCatConfig) -> str:
    """The name of the VAE and text encoder; for edits, the encoder also sees the pictures."""
    return "longcat_edit" if model.reference_latents else "longcat"


def _inputs(model: LongCatConfig) -> tuple[SampleInput, ...]:
    references = reference_inputs(model, clean=False)
    text = text_input(model, encoder=_codec(model), may_be_empty=True)
    return (text, *references, *(null_text_inputs(model) if references else ()))


FAMILY = Family(
    name="longcat",
    config=LongCatConfig,
    network=imported("dit.models.longcat.model:LongCatNetwork"),
    spec=lambda model: NetworkSpec(stacks=double_then_single(model)),
    parts={**JOINT_PARTS, "single_blocks": "single"},
    diffusers=imported("dit.models.longcat.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # the network moves pictures after their text
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={size: {"time_shift_type": "exponential"} for size in MODEL_SIZES},
        clean_level=None,
        # The pipeline of edits does not rescale guidance.
        keeps_norm=lambda model: None if model.reference_latents else KeptNorm.TOKEN_AT_MOST,
    ),
    vae=_codec,
    tiny=TINY,
)
