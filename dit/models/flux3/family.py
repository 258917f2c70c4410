"""The family `flux3`, FLUX.3 klein: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import TextPadding
from dit.config.checks import Rule, bounded
from dit.config.resume import OfInputs
from dit.models.family import (
    Family,
    HasReferences,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    half_step_positions,
    reference_inputs,
    text_input,
)
from dit.models.joint.family import (
    EVEN_STEPS,
    JOINT_PARTS,
    TINY_DOUBLE_SINGLE,
    DoubleSingleConfig,
    axes_fill_heads,
    joint_layer_parts,
)
from dit.models.layer_spec import (
    JOINT_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    Activation,
    AttendAndFeed,
    LayerSpec,
    Modulation,
    NetworkSpec,
    PicturesAlone,
    Port,
    ReferencesAlone,
    SharedModulation,
    StackSpec,
    View,
)
from dit.models.registry import imported

EARLY, SINGLE, HEAD = 3, 3, 2
"""Numbers of modulation vectors: 3 (shift, scale, gate) of the separate layers, 3 of the joint
layers, and 2 (shift, scale) of the head."""
ALL_VECTORS = EARLY + SINGLE + HEAD
STACKS = ("text_blocks", "image_blocks", "reference_blocks")
"""Names of the separate stacks, which come before the joint layers (`blocks`)."""
MOST_REFERENCES = 10
LONGEST_TEXT = 8192
SHIFT = 6.93
"""Shift of the noise levels in Diffusers' modular pipelines."""

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "flux3_klein_base": {},
    "flux3_klein": {"flow_map": True},
}
"""Fields of `model` by size name; all other fields have the defaults of Diffusers' class."""
_TINY = {
    **TINY_DOUBLE_SINGLE,
    "num_single_layers": 2,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "patch_spatial": 2,
    "crossattn_emb_size": 16,
    "rope_axes": (2, 4, 4, 2),
    "text_pad_to": TextPadding.STORED,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "flux3_klein_base": {**_TINY, "reference_latents": 1},
    "flux3_klein": _TINY,
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class Flux3Config(HasReferences, DoubleSingleConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    takes_stored_padding: ClassVar[bool] = True

    name: str = "flux3_klein_base"
    """A named size (flux3_klein_base, flux3_klein) or `custom`."""
    family: str = "flux3"
    num_layers: int = 5
    """Number of layers of each of the three separate stacks: for text, for the picture, and for
    references."""
    num_single_layers: int = bounded(28, most=2**14)
    """Number of joint layers of text, picture and references, after the separate ones."""
    mlp_ratio: float = 3.0
    in_channels: int = 128
    patch_spatial: int = 1
    crossattn_emb_size: int = 20480
    rope_axes: tuple[int, int, int, int] = (32, 32, 32, 32)  # type: ignore[assignment]
    """Widths of a head rotated by time, row, column and index in the text; their sum is the head's
    width."""
    text_pad_to: TextPadding | None = None
    """How captions are padded: stored (shards hold the encoder's states of padding, which published
    weights attend to), or null (not at all)."""
    flow_map: bool = False
    """Whether the network was distilled to few steps and also gets the timestep at which a step
    ends; in training this is the sample's own timestep."""
    reference_latents: OfInputs[int] = bounded(0, most=MOST_REFERENCES, least=0)

    def own_sizes(self) -> list[Rule]:
        first, early = self.route_from, len(STACKS) * self.num_layers
        return [
            *super().own_sizes(),
            (
                first is None or first >= early,
                f"route_from={first} must be {early} or more: the first {early} layers of this"
                " network process text and pictures separately, and need all their tokens",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self)]

    @property
    def all_layers(self) -> int:
        return len(STACKS) * self.num_layers + self.num_single_layers

    @property
    def unguided_by(self) -> str | None:
        return "model.flow_map=true" if self.flow_map else None

    @property
    def whole_samples_by(self) -> str | None:
        pictures = self.reference_latents
        return f"model.reference_latents={pictures}" if pictures else None


def flux3_stacks(model: Flux3Config) -> tuple[StackSpec, ...]:
    """The specifications of all stacks.

    Text, picture and references have different modulation vectors.
    """
    parts = joint_layer_parts(model, activation=Activation.SWIGLU, bias=False)

    def layer(row: str, first: int = 0, view: View | None = None) -> LayerSpec:
        port = Port(row, slot=Modulation("modulation", SharedModulation(first))[0])
        return LayerSpec((AttendBesideFeed(port, **parts),), view)

    references = ReferencesAlone(idle=not model.reference_latents)
    early = (
        layer(TEXT_TOKENS),
        layer(TOKENS, view=PicturesAlone()),
        layer(TOKENS, view=references),
    )
    stacks = zip(STACKS, early, strict=True)
    return (
        *(StackSpec(name=name, count=model.num_layers, layer=one) for name, one in stacks),
        StackSpec(name="blocks", count=model.num_single_layers, layer=layer(JOINT_TOKENS, EARLY)),
    )


@dataclass(frozen=True)
class AttendBesideFeed(AttendAndFeed):
    """Attention and feed-forward in parallel on the same tokens, with separate linears."""

    runs: ClassVar[str] = "dit.models.flux3.model:AttendingBesideFeeding"

    @property
    def exchanges(self) -> int:
        return 1 + self.feed_forward.exchanges


def _inputs(model: Flux3Config) -> tuple[SampleInput, ...]:
    return (
        text_input(model, encoder="flux3_klein", most_rows=LONGEST_TEXT),
        *reference_inputs(model, clean=True),
    )


FAMILY = Family(
    name="flux3",
    config=Flux3Config,
    network=imported("dit.models.flux3.model:Flux3Network"),
    spec=lambda model: NetworkSpec(stacks=flux3_stacks(model)),
    parts={
        "image_modulations.out": "head",
        **{"text_blocks": "text", "image_blocks": "picture", "reference_blocks": "references"},
        **JOINT_PARTS,
    },
    diffusers=imported("dit.models.flux3.diffusers:FORM"),
    inputs=_inputs,
    positions=half_step_positions,
    weights=WeightRules(zero=("*modulation*.weight", "proj_out.weight")),  # like `ADALN_ZERO`
    objective=ObjectiveConventions(
        settings=EVEN_STEPS, of_size={size: {"flow_shift": SHIFT} for size in MODEL_SIZES}
    ),
    tells_step_end=lambda model: model.flow_map,
    trains_step_end=True,
    vae=lambda _: "flux3_klein",
    tiny=TINY,
)
