"""The family `lumina2`, Lumina Image 2.0: its fields, sizes and rules, and what else it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.config.resume import Refused
from dit.models.family import (
    TINY_NETWORK,
    Family,
    KeptNorm,
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
    even_axes,
    key_heads_divide,
    learns_pictures,
)
from dit.models.joint.refined import refined_cost, refined_stacks
from dit.models.layer_spec import (
    MOST_REFINER_LAYERS,
    AttentionSpec,
    NetworkCost,
    PerBlockModulation,
    StackSpec,
)
from dit.models.registry import imported

TITLE, EPS = "Lumina Image 2.0", 1e-5
_MOST_TOLD = 1024
AXES_LENS = (300, 512, 512)
"""Rows of Diffusers' tables of angles: for places in the text and behind it, rows, columns."""

MODEL_SIZES: dict[str, dict[str, Any]] = {"lumina2": {}}
"""What each `model.name` sets: config.json of Alpha-VLLM/Lumina-Image-2.0."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "lumina2": {
        **TINY_NETWORK,
        "num_refiner_layers": 1,
        "hidden_size": 96,
        "num_attention_heads": 12,
        "num_kv_heads": 4,
        "mlp_ratio": 1.0,
        "crossattn_emb_size": 16,
        "rope_axes": (2, 2, 4),
    }
}
"""Named size -> what makes it tiny (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lumina2Config(ModelConfig):
    """The network: sizes, precision and how it is spread over devices."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    shown_before: ClassVar[Mapping[str, str]] = {
        "num_refiner_layers": "hidden_size",
        "num_kv_heads": "mlp_ratio",
    }

    name: str = "lumina2"
    """A named size (lumina2) or `custom`."""
    family: str = "lumina2"
    num_layers: int = 26
    """Layers over latents and text together."""
    num_refiner_layers: Refused[int] = bounded(2, most=MOST_REFINER_LAYERS)
    """Layers before these over latents alone, and as many over text alone."""
    hidden_size: int = 2304
    num_attention_heads: int = 24
    """Heads of queries."""
    num_kv_heads: Refused[int] = bounded(8, most=2**14)
    """Heads of keys and values, each read by num_attention_heads / num_kv_heads heads of queries;
    tensor ranks share them."""
    crossattn_emb_size: int = 2304
    rope_axes: Refused[tuple[int, int, int]] = bounded((32, 32, 32), most=2**17, at_least_one=False)
    """Widths of a head rotated by place in the text, row and column; their sum is its width."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        return [
            even_axes(self),
            attends_to_no_padding(self, TITLE),
            learns_pictures(self, TITLE),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self), *key_heads_divide(self)]

    @property
    def all_layers(self) -> int:
        return self.num_layers + 2 * self.num_refiner_layers

    @property
    def largest_latent(self) -> tuple[int, int, int]:
        """Sides as long as the tables of Diffusers' network."""
        rows, columns = (side * self.patch_spatial for side in AXES_LENS[1:])
        return 2**20, rows, columns

    @property
    def cost_sizes(self) -> list[int]:
        sizes = ModelConfig.cost_sizes.fget(self)  # type: ignore[attr-defined]
        return [*sizes, self.num_refiner_layers, self.num_kv_heads, self.crossattn_emb_size]

    @property
    def told_width(self) -> int:
        """Width of the embedding of the level."""
        return min(self.hidden_size, _MOST_TOLD)


def lumina2_stacks(model: Lumina2Config) -> tuple[StackSpec, ...]:
    heads: Any = {"heads": model.num_attention_heads, "groups": model.num_kv_heads}
    attention = AttentionSpec(width=model.hidden_size, eps=EPS, **heads)
    return refined_stacks(model, attention, PerBlockModulation(inputs=model.told_width))


def lumina2_cost(model: Lumina2Config) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `Lumina2Transformer2DModel`."""
    return refined_cost(model, lumina2_stacks(model), inside_of_told=model.told_width)


def _inputs(model: Lumina2Config) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder="lumina2"),)


FAMILY = Family(
    name="lumina2",
    config=Lumina2Config,
    network=imported("dit.models.lumina2.model:Lumina2Network"),
    cost=lumina2_cost,
    parts={**JOINT_PARTS, "context_refiner": "text"},
    diffusers=imported("dit.models.lumina2.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # the network adds the length of the caption to the first number
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
