"""The family `qwen_image21`, Qwen-Image-2.1: its fields, sizes, rules and `Family`."""

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
    HasReferences,
    InputKind,
    NullInput,
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
    even_axes,
    learns_pictures,
)
from dit.models.layer_spec import (
    JOINT_TOKENS,
    Activation,
    Attend,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    LayerSpec,
    Modulation,
    NetworkSpec,
    Port,
    SharedModulation,
    StackSpec,
)
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

EPS = 1e-6
THETA = 10_000.0
"""Base of the rotary frequencies on all axes."""
VECTORS: Mapping[str, int] = {"blocks": 4, "out": 1}
"""Number of modulation vectors (scales, gates) of all layers together, and of the head."""
MOST_REFERENCES = 10
SIDES = 2
"""Number that must divide the latent rows and columns of a picture: a placeholder token in the text
encoder's output stands for 2 x 2 latent pixels."""
TITLE = "Qwen-Image-2.1"
CODEC = "qwen_image21"
"""Name in `dit.codecs` of the VAE and of the text encoder."""

MODEL_SIZES: dict[str, dict[str, Any]] = {"qwen_image21": {}, "qwen_image21_turbo": {}}
"""Fields of `model` by size name, from config.json of Qwen/Qwen-Image-2.1 and its Turbo."""
_TINY = {
    **TINY_NETWORK,
    "hidden_size": 64,
    "mlp_ratio": 1.0,
    "crossattn_emb_size": 24,
    "rope_axes": (4, 4, 8),
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen_image21": {**_TINY, "reference_latents": 1},
    "qwen_image21_turbo": _TINY,
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class QwenImage21Config(HasReferences, ModelConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "qwen_image21"
    """A named size (qwen_image21, qwen_image21_turbo) or `custom`."""
    family: str = "qwen_image21"
    num_layers: int = 32
    """Number of layers; each computes latents and text jointly."""
    hidden_size: int = 4096
    num_attention_heads: int = 32
    """Number of attention heads."""
    mlp_ratio: float = 3.0
    in_channels: int = 64
    patch_spatial: int = 1
    crossattn_emb_size: int = 4096
    rope_axes: tuple[int, int, int] = bounded((16, 56, 56), most=2**17, least=None)
    """Widths of a head rotated by index in the sequence, by row, and by column; their sum is the
    head's width."""
    causal_condition: bool = True
    """Whether text and references have timestep 0; if not, they have the timestep of their
    sample."""
    reference_latents: OfInputs[int] = bounded(0, most=MOST_REFERENCES, least=0)

    def own_sizes(self) -> list[Rule]:
        count, first = self.reference_latents, self.route_from
        return [
            even_axes(self),
            learns_pictures(self, TITLE),
            attends_to_no_padding(self, TITLE),
            (
                first is None or not count,
                f"route_from={first} must be null, and route_to, too, because"
                f" reference_latents={count}: texts after a reference of {TITLE} attend to all its"
                " tokens, and token routing would leave some out. Or set reference_latents=0",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self)]

    @property
    def side_cells(self) -> int:
        return SIDES * self.patch_spatial

    @property
    def whole_samples_by(self) -> str | None:
        count = self.reference_latents
        return f"model.reference_latents={count}" if count else None


def qwen_image21_stack(model: QwenImage21Config) -> StackSpec:
    """The specification of the layers, which share one set of modulation vectors (`VECTORS`)."""
    width = model.hidden_size
    attention = AttentionSpec(width=width, heads=model.num_attention_heads, eps=EPS)
    mlp = FeedForwardSpec(width=width, hidden=model.ffn_hidden_size, activation=Activation.SWIGLU)
    m = Modulation("modulation", SharedModulation(0), shifted=False, tanh=True)
    steps = (
        Attend(Port(JOINT_TOKENS, "attention", m[0]), attention),
        Feed(Port(JOINT_TOKENS, "mlp", m[1]), mlp),
    )
    return StackSpec(name="blocks", count=model.num_layers, layer=LayerSpec(steps))


def text_names(model: QwenImage21Config) -> tuple[str, ...]:
    """The names of a sample's texts, in order: one before each reference, then the caption."""
    return (*(f"text_before_{n}" for n in range(model.reference_latents)), "text")


def _inputs(model: QwenImage21Config) -> tuple[SampleInput, ...]:
    # These are states of a causal encoder, which sees the pictures before each text.
    before: Any = {"kind": InputKind.TEXT, "width": model.crossattn_emb_size, "required": False}
    before |= {"may_be_empty": True, "null": NullInput.KEPT, "encoder": CODEC}
    *names, _ = text_names(model)
    return (
        text_input(model, encoder=CODEC),
        *(SampleInput(name=name, **before) for name in names),
        *reference_inputs(model, clean=True),
        *(null_text_inputs(model) if names else ()),
    )


def _positions(_: QwenImage21Config) -> PositionRule:
    # The network replaces the picture number by an index in the sequence.
    return resolve_name("dit.models.positions:CentredPositions")(counts_frames=False)


_PUBLISHED = {"time_shift_type": "exponential", "base_shift": 0.5, "max_shift": 1.15}

FAMILY = Family(
    name="qwen_image21",
    config=QwenImage21Config,
    network=imported("dit.models.qwen_image21.model:QwenImage21Network"),
    spec=lambda model: NetworkSpec(stacks=(qwen_image21_stack(model),)),
    parts={"modulations.out": "head", **JOINT_PARTS},
    diffusers=imported("dit.models.qwen_image21.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(zero=("modulations.*.weight", "proj_out.weight")),  # like `ADALN_ZERO`
    objective=ObjectiveConventions(
        settings=EVEN_STEPS, of_size=dict.fromkeys(MODEL_SIZES, _PUBLISHED)
    ),
    vae=lambda _: CODEC,
    distilled=("qwen_image21_turbo",),
    tiny=TINY,
)
