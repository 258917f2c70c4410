"""The family `omnigen2`, OmniGen2: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config.checks import Rule, bounded
from dit.config.resume import OfInputs
from dit.models.family import (
    Family,
    HasReferences,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    reference_inputs,
    references_first_positions,
    text_input,
)
from dit.models.joint.family import ADALN_ZERO, EVEN_STEPS, JOINT_PARTS
from dit.models.joint.refined import (
    TINY_REFINED,
    GroupedRefinedConfig,
    refined_spec,
    refined_stacks,
)
from dit.models.layer_spec import (
    MOST_REFINER_LAYERS,
    AttentionSpec,
    PerBlockModulation,
    StackSpec,
)
from dit.models.registry import imported

EPS = 1e-5
MOST_REFERENCES = 5
"""Largest number of references; the network has an embedding for each of them."""
_SIDE = 2
"""Side of a patch in latent pixels."""
LEVELS: Mapping[str, Any] = {**EVEN_STEPS, "shift_base_tokens": 40**2 // _SIDE**2}
"""Keys of `objective` as in the pipeline, whose scheduler shifts noise levels by
sqrt(rows * columns) / 40 of the latent; for 400 tokens this is 1, no shift."""

MODEL_SIZES: dict[str, dict[str, Any]] = {"omnigen2": {}}
"""Fields of `model` by size name, from options/ft.yml of the public code."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "omnigen2": {**TINY_REFINED, "num_kv_heads": 4, "reference_latents": 1}
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class OmniGen2Config(HasReferences, GroupedRefinedConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    refiners: ClassVar[int] = 3
    title: ClassVar[str] = "OmniGen2"

    name: str = "omnigen2"
    """A named size (omnigen2) or `custom`."""
    family: str = "omnigen2"
    num_layers: int = 32
    """Number of joint layers of text, references and target."""
    num_refiner_layers: int = bounded(2, most=MOST_REFINER_LAYERS)
    """Number of layers of each of three refiners before the joint layers: for the target, for each
    reference, and for text."""
    hidden_size: int = 2520
    num_attention_heads: int = 21
    num_kv_heads: int = bounded(7, most=2**14)
    mlp_ratio: float = 10240 / 2520
    crossattn_emb_size: int = 2048
    rope_axes: tuple[int, int, int] = bounded((40, 40, 40), most=2**17, least=None)
    reference_latents: OfInputs[int] = bounded(0, most=MOST_REFERENCES, least=0)

    def own_sizes(self) -> list[Rule]:
        first, refined = self.route_from, self.refiners * self.num_refiner_layers
        return [
            *super().own_sizes(),
            (
                self.patch_spatial == _SIDE,
                f"patch_spatial={self.patch_spatial} must be {_SIDE}, as in the published network:"
                f" the shift of noise levels of {self.title} depends on it",
            ),
            (
                first is None or first >= refined,
                f"route_from={first} must be {refined} or more: the first {refined} layers of"
                f" {self.title} are refiners, which need all tokens",
            ),
        ]

    @property
    def whole_samples_by(self) -> str | None:
        pictures = self.reference_latents
        return f"model.reference_latents={pictures}" if pictures else None


def omnigen2_stacks(model: OmniGen2Config) -> tuple[StackSpec, ...]:
    heads: Any = {"heads": model.num_attention_heads, "groups": model.num_kv_heads}
    attention = AttentionSpec(width=model.hidden_size, eps=EPS, **heads)
    told = PerBlockModulation(inputs=model.told_width)
    return refined_stacks(model, attention, told, references=model.reference_latents)


def _inputs(model: OmniGen2Config) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder="omnigen2"), *reference_inputs(model, clean=False))


FAMILY = Family(
    name="omnigen2",
    config=OmniGen2Config,
    network=imported("dit.models.omnigen2.model:OmniGen2Network"),
    spec=lambda model: refined_spec(model, omnigen2_stacks(model)),
    parts={**JOINT_PARTS, "context_refiner": "text"},
    diffusers=imported("dit.models.omnigen2.diffusers:FORM"),
    inputs=_inputs,
    positions=references_first_positions,  # the network adds the length of the caption
    weights=WeightRules(zero=ADALN_ZERO, no_decay=("picture_number.weight",)),
    objective=ObjectiveConventions(
        settings=LEVELS,
        sign=-1,
        tells_data_part=True,
        clean_level=None,
        guides_by_references=True,
    ),
    vae=lambda _: "omnigen2",
    tiny=TINY,
)
