"""The family `zimage`, Z-Image and Z-Image-Turbo: its fields, sizes, rules and `Family`."""

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
    text_input,
)
from dit.models.joint.family import ADALN_ZERO, EVEN_STEPS, JOINT_PARTS
from dit.models.joint.refined import (
    TINY_REFINED,
    RefinedConfig,
    refined_spec,
    refined_stacks,
    sides_of_tables,
)
from dit.models.layer_spec import AttentionSpec, PerBlockModulation, StackSpec
from dit.models.registry import imported

EPS = 1e-5
INSIDE_OF_TOLD = 1024
"""Hidden width of the timestep embedding's MLP; fixed in Diffusers."""
THETA = 256.0
"""Base of the rotary frequencies for index in the text, row and column."""
MLP_RATIO = 8 / 3
"""MLP ratio of Diffusers' class, whose config.json has no key for it."""
AXES_LENS = (1536, 512, 512)
"""Lengths of Diffusers' rotary tables, for index in the sequence, row and column."""
LONGEST_TEXT = (AXES_LENS[0] - 2) // 32 * 32
"""Largest number of caption tokens, a multiple of 32. Their indices start at 1, and the picture has
the index after them, which must be in the table, too."""
_OTHER_PICTURES = (
    "layers for SigLIP's features of pictures besides the target, which this family does not have"
)

MODEL_SIZES: dict[str, dict[str, Any]] = {"zimage": {}, "zimage_turbo": {}}
"""Fields of `model` by size name, from config.json of Tongyi-MAI/Z-Image and of Z-Image-Turbo."""
TINY: Mapping[str, Mapping[str, Any]] = {"zimage": TINY_REFINED}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class ZImageConfig(RefinedConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    attended_multiple: ClassVar[int] = 32
    attends_to_padding: ClassVar[bool] = True
    most_told: ClassVar[int] = 256
    title: ClassVar[str] = "Z-Image"

    name: str = "zimage"
    """A named size (zimage, zimage_turbo) or `custom`."""
    family: str = "zimage"
    num_layers: int = 30
    hidden_size: int = 3840
    num_attention_heads: int = 30
    """Number of attention heads; tensor_model_parallel_size must divide it."""
    mlp_ratio: float = MLP_RATIO
    """Width of the MLP divided by hidden_size; always 8/3 in Diffusers."""
    crossattn_emb_size: int = 2560
    rope_axes: tuple[int, int, int] = bounded((32, 48, 48), most=2**17, least=None)

    def own_sizes(self) -> list[Rule]:
        return [
            *super().own_sizes(),
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to} must be null: {self.title} pads captions with"
                " learned tokens",
            ),
            (
                self.token_route is None,
                f"route_from={self.route_from} must be null, and route_to, too: {self.title}"
                " attends to padding, and token routing would leave out some of it",
            ),
        ]

    @property
    def ffn_hidden_size(self) -> int:
        if self.mlp_ratio == MLP_RATIO:
            return int(self.hidden_size / 3 * 8)  # rounded as in Diffusers
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def largest_latent(self) -> tuple[int, int, int]:
        """Largest latent (frames, rows, columns) that the tables of Diffusers' network cover."""
        return sides_of_tables(self, AXES_LENS)


def zimage_stacks(model: ZImageConfig) -> tuple[StackSpec, ...]:
    attention = AttentionSpec(width=model.hidden_size, heads=model.num_attention_heads, eps=EPS)
    told = PerBlockModulation(inputs=model.told_width, activated=False)
    return refined_stacks(model, attention, told)


def _inputs(model: ZImageConfig) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder="zimage", most_rows=LONGEST_TEXT),)


FAMILY = Family(
    name="zimage",
    config=ZImageConfig,
    network=imported("dit.models.zimage.model:ZImageNetwork"),
    spec=lambda model: refined_spec(model, zimage_stacks(model)),
    parts={**JOINT_PARTS, "context_refiner": "text"},
    diffusers=imported("dit.models.zimage.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # the network adds the length of the caption + 1 to the first axis
    weights=WeightRules(zero=(*ADALN_ZERO, "*padding.token"), no_decay=("*padding.token",)),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={"zimage": {"flow_shift": 6.0}, "zimage_turbo": {"flow_shift": 3.0}},
        sign=-1,
        tells_data_part=True,
        clean_level=None,
    ),
    vae=lambda _: "zimage",
    distilled=("zimage_turbo",),
    refused={"zimage_omni": _OTHER_PICTURES, "zimage_edit": _OTHER_PICTURES},
    tiny=TINY,
)
