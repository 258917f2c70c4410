"""The family `ernie_image`, ERNIE-Image and its Turbo: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.models.family import (
    TINY_NETWORK,
    Family,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    text_input,
)
from dit.models.joint.family import (
    EVEN_STEPS,
    JOINT_PARTS,
    attends_to_no_padding,
    axes_fill_heads,
    even_axes,
    learns_pictures,
    sequential_layer,
)
from dit.models.layer_spec import (
    Activation,
    Attend,
    AttentionSpec,
    FeedForwardSpec,
    Modulation,
    NetworkSpec,
    RowNorm,
    SharedModulation,
    StackSpec,
)
from dit.models.registry import imported

EPS = 1e-6
THETA = 256.0
"""Base of the rotary frequencies for index in the text, row and column."""
VECTORS: Mapping[str, int] = {"blocks": 6, "out": 2}
"""Number of modulation vectors (scales, shifts, gates) of all layers together, and of the head."""
FIRST_OF_HEAD, ALL_VECTORS = accumulate(VECTORS.values())
TITLE = "ERNIE-Image"

MODEL_SIZES: dict[str, dict[str, Any]] = {"ernie_image": {}, "ernie_image_turbo": {}}
"""Fields of `model` by size name, from config.json of baidu/ERNIE-Image and -Turbo."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "ernie_image": {
        **TINY_NETWORK,
        "hidden_size": 64,
        "mlp_ratio": 1.25,
        "patch_spatial": 2,
        "crossattn_emb_size": 16,
        "rope_axes": (4, 6, 6),
    }
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class ErnieImageConfig(ModelConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "ernie_image"
    """A named size (ernie_image, ernie_image_turbo) or `custom`."""
    family: str = "ernie_image"
    num_layers: int = 36
    """Number of layers; each computes latents and text jointly."""
    hidden_size: int = 4096
    num_attention_heads: int = 32
    """Number of attention heads."""
    mlp_ratio: float = 3.0
    in_channels: int = 128
    patch_spatial: int = 1
    crossattn_emb_size: int = 3072
    rope_axes: tuple[int, int, int] = bounded((32, 48, 48), most=2**17, least=None)
    """Widths of a head rotated by index in the text, by row, and by column; their sum is the head's
    width."""

    def own_sizes(self) -> list[Rule]:
        return [
            even_axes(self),
            learns_pictures(self, TITLE),
            attends_to_no_padding(self, TITLE),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self)]

    @property
    def projects_text(self) -> bool:
        """Whether a linear projects the text, because its width differs from the hidden size."""
        return self.crossattn_emb_size != self.hidden_size


@dataclass(frozen=True)
class AttendTwisted(Attend):
    """Attention in which the two numbers of a rotary pair have different angles.

    A `RotaryTable` with `twisted` computes the angles. There is no fused kernel for the norm of
    queries and keys with this rotation.
    """

    @property
    def in_one_kernel(self) -> bool:
        return False


def ernie_image_stack(model: ErnieImageConfig) -> StackSpec:
    """The specification of the layers, which share one set of modulation vectors (`VECTORS`)."""
    width, heads = model.hidden_size, model.num_attention_heads
    attention = AttentionSpec(width=width, heads=heads, eps=EPS)
    mlp = FeedForwardSpec(width=width, hidden=model.ffn_hidden_size, activation=Activation.GEGLU)
    modulation, norm = Modulation("modulation", SharedModulation(0)), RowNorm("norm", eps=EPS)
    layer = sequential_layer(attention, mlp, modulation, norm=norm, attend=AttendTwisted)
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


def _inputs(model: ErnieImageConfig) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder="ernie_image"),)


_PUBLISHED = {"flow_shift": 4.0}  # scheduler_config.json

FAMILY = Family(
    name="ernie_image",
    config=ErnieImageConfig,
    network=imported("dit.models.ernie_image.model:ErnieImageNetwork"),
    spec=lambda model: NetworkSpec(stacks=(ernie_image_stack(model),)),
    parts={"modulations.out": "head", **JOINT_PARTS},
    diffusers=imported("dit.models.ernie_image.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # the network adds the length of the caption to the first axis
    # Like `ADALN_ZERO`, with this family's names of weights.
    weights=WeightRules(zero=("modulations.*.weight", "proj_out.weight")),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size=dict.fromkeys(MODEL_SIZES, _PUBLISHED),
        clean_level=None,
    ),
    vae=lambda _: "ernie_image",
    distilled=("ernie_image_turbo",),
    tiny=TINY,
)
