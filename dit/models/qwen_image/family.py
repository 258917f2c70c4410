"""The family `qwen_image`, Qwen-Image: its fields, sizes, rules, inputs and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.config.resume import OfInputs
from dit.models.family import (
    TINY_NETWORK,
    Family,
    KeptNorm,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    null_text_inputs,
    reference_inputs,
    text_input,
)
from dit.models.joint.family import (
    EVEN_STEPS,
    JOINT_PARTS,
    attends_to_no_padding,
    axes_fill_heads,
    double_layer,
    even_axes,
    joint_layer_parts,
    learns_pictures,
)
from dit.models.layer_spec import (
    NetworkSpec,
    StackSpec,
)
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

SCALE = 1000
"""Timestep of the schedulers of Diffusers divided by t."""

MOST_REFERENCES = 3
"""Largest number of pictures to edit in our network; Diffusers' pipeline has no limit."""

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "qwen_image": {},
    "qwen_image_edit": {"reference_latents": 1},
    "qwen_image_edit_2511": {"reference_latents": MOST_REFERENCES, "clean_references": True},
}
_TINY = {
    **TINY_NETWORK,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "crossattn_emb_size": 24,
    "rope_axes": (4, 4, 8),
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen_image": _TINY,
    "qwen_image_edit_2511": _TINY | {"reference_latents": 1},
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class QwenImageConfig(ModelConfig):
    """Keys of `model`: sizes, positions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "qwen_image"
    """A named size (qwen_image, qwen_image_edit, qwen_image_edit_2511) or `custom`."""
    family: str = "qwen_image"
    num_layers: int = 60
    hidden_size: int = 3072
    num_attention_heads: int = 24
    crossattn_emb_size: int = 3584
    rope_axes: tuple[int, int, int] = bounded((16, 56, 56), most=2**20, least=None)
    """Widths of a head rotated by picture, row and column, all even; their sum is the head's
    width."""
    reference_latents: OfInputs[int] = 0
    """Largest number of pictures to edit in a sample, as latents of any size; at most 3."""
    clean_references: bool = False
    """Whether pictures to edit have noise level 0 (2511) instead of the level of their sample."""

    def own_sizes(self) -> list[Rule]:
        count = self.reference_latents
        return [
            (
                0 <= count <= MOST_REFERENCES,
                f"reference_latents={count} must be between 0 and {MOST_REFERENCES}",
            ),
            (
                not self.clean_references or count > 0,
                "clean_references=true needs reference_latents of at least 1; set"
                " clean_references=false, or raise reference_latents",
            ),
            even_axes(self),
        ]

    def own_shapes(self) -> list[Rule]:
        return [
            axes_fill_heads(self),
            attends_to_no_padding(self, "Qwen-Image"),
            learns_pictures(self, "Qwen-Image"),
        ]


def _positions(_: QwenImageConfig) -> PositionRule:
    return resolve_name("dit.models.positions:CentredPositions")()


def _codec(model: QwenImageConfig) -> str:
    """The name of the VAE and text encoder; for edits, the encoder also sees the pictures."""
    if not model.reference_latents:
        return "qwen_image"
    return "qwen_image_edit_2511" if model.clean_references else "qwen_image_edit"


def _inputs(model: QwenImageConfig) -> tuple[SampleInput, ...]:
    text = text_input(model, encoder=_codec(model), may_be_empty=True)
    references = reference_inputs(model, clean=model.clean_references)
    return (text, *references, *(null_text_inputs(model) if references else ()))


def qwen_image_stack(model: QwenImageConfig) -> StackSpec:
    """The specification of Qwen-Image's double-stream layers."""
    layer = double_layer(**joint_layer_parts(model))
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


# From scheduler_config.json of the published weights: the shift depends on the number of tokens.
_PUBLISHED = {
    "time_shift_type": "exponential",
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}

FAMILY = Family(
    name="qwen_image",
    config=QwenImageConfig,
    network=imported("dit.models.qwen_image.model:QwenImageNetwork"),
    spec=lambda model: NetworkSpec(stacks=(qwen_image_stack(model),)),
    parts={
        "text_attention": "text",
        "text_mlp": "text",
        "text_modulation": "modulation",
        "text_in": "text",
        **JOINT_PARTS,
    },
    diffusers=imported("dit.models.qwen_image.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    # Gates and the output linear start at zero, as in adaLN-Zero (arXiv:2212.09748).
    weights=WeightRules(zero=("*modulation.linear.weight", "*proj_out.weight")),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size=dict.fromkeys(MODEL_SIZES, _PUBLISHED),
        keeps_norm=lambda _: KeptNorm.TOKEN,
    ),
    vae=_codec,
    tiny=TINY,
)
