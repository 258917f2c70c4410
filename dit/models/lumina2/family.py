"""The family `lumina2`, Lumina Image 2.0: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.models.family import (
    Family,
    KeptNorm,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    text_input,
)
from dit.models.joint.family import ADALN_ZERO, EVEN_STEPS, JOINT_PARTS
from dit.models.joint.refined import (
    TINY_REFINED,
    GroupedRefinedConfig,
    refined_spec,
    refined_stacks,
    sides_of_tables,
)
from dit.models.layer_spec import AttentionSpec, PerBlockModulation, StackSpec
from dit.models.registry import imported

EPS = 1e-5
AXES_LENS = (300, 512, 512)
"""Lengths of Diffusers' rotary tables, for index in the sequence, row and column."""

LONGEST_TEXT = AXES_LENS[0] - 1
"""Largest number of caption tokens: the picture has the index after them, which must be in the
table, too."""

MODEL_SIZES: dict[str, dict[str, Any]] = {"lumina2": {}}
"""Fields of `model` by size name, from config.json of Alpha-VLLM/Lumina-Image-2.0."""
TINY: Mapping[str, Mapping[str, Any]] = {"lumina2": {**TINY_REFINED, "num_kv_heads": 4}}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class Lumina2Config(GroupedRefinedConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    title: ClassVar[str] = "Lumina Image 2.0"

    name: str = "lumina2"
    """A named size (lumina2) or `custom`."""
    family: str = "lumina2"
    hidden_size: int = 2304
    crossattn_emb_size: int = 2304

    @property
    def largest_latent(self) -> tuple[int, int, int]:
        """Largest latent (frames, rows, columns) that the tables of Diffusers' network cover."""
        return sides_of_tables(self, AXES_LENS)


def lumina2_stacks(model: Lumina2Config) -> tuple[StackSpec, ...]:
    heads: Any = {"heads": model.num_attention_heads, "groups": model.num_kv_heads}
    attention = AttentionSpec(width=model.hidden_size, eps=EPS, **heads)
    return refined_stacks(model, attention, PerBlockModulation(inputs=model.told_width))


def _inputs(model: Lumina2Config) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder="lumina2", most_rows=LONGEST_TEXT),)


FAMILY = Family(
    name="lumina2",
    config=Lumina2Config,
    network=imported("dit.models.lumina2.model:Lumina2Network"),
    spec=lambda model: refined_spec(model, lumina2_stacks(model)),
    parts={**JOINT_PARTS, "context_refiner": "text"},
    diffusers=imported("dit.models.lumina2.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # the network adds the length of the caption to the first axis
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={"lumina2": {"flow_shift": 6.0}},
        sign=-1,
        tells_data_part=True,
        clean_level=None,
        keeps_norm=lambda _: KeptNorm.PICTURE_ROW,
    ),
    vae=lambda _: "lumina2",
    tiny=TINY,
)
