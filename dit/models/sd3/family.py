"""The family `sd3`, Stable Diffusion 3 and 3.5: its fields, sizes, rules, inputs and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from dit.config import ModelConfig, TextPadding
from dit.config.checks import Rule, bounded
from dit.models.family import (
    TINY_NETWORK,
    Family,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    pooled_input,
    text_input,
)
from dit.models.joint.family import (
    ADALN_ZERO,
    JOINT_PARTS,
    joint_layer_parts,
    learns_pictures,
)
from dit.models.layer_spec import (
    TEXT_TOKENS,
    TOKENS,
    Attend,
    Feed,
    LayerSpec,
    Modulation,
    NetworkSpec,
    PerBlockModulation,
    Port,
    QkNorm,
    StackSpec,
)
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

TABLE = "positions.table"

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "sd3": {},
    "sd3.5_medium": {"qk_norm": True, "dual_attention_layers": 13, "max_size": (1, 768, 768)},
    "sd3.5_large": {
        "qk_norm": True,
        "num_layers": 38,
        "hidden_size": 2432,
        "num_attention_heads": 38,
    },
}
"""Fields of `model` by size name, from Diffusers' scripts/convert_sd3_to_diffusers.py."""
_TINY = {
    **TINY_NETWORK,
    "hidden_size": 64,
    "crossattn_emb_size": 16,
    "pooled_size": 10,
    "max_size": (1, 24, 24),
    "sample_size": 16,
    "text_pad_to": TextPadding.STORED,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "sd3": _TINY,
    "sd3.5_medium": _TINY | {"dual_attention_layers": 1},
}
"""Keys of `model` for tiny networks (`Family.tiny`). `sd3.5_large` has no entry: `sd3.5_medium` has
all its kinds of layers."""


@dataclass(frozen=True, kw_only=True)
class Sd3Config(ModelConfig):
    """Keys of `model`: sizes, positions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    takes_stored_padding: ClassVar[bool] = True

    name: str = "sd3"
    """A named size (sd3, sd3.5_medium, sd3.5_large) or `custom`."""
    family: str = "sd3"
    num_layers: int = 24
    """Number of double-stream layers, in which latents and text have separate weights, but attend
    to each other."""
    hidden_size: int = 1536
    num_attention_heads: int = 24
    crossattn_emb_size: int = 4096
    text_pad_to: TextPadding | None = None
    """How captions are padded: stored (shards hold the encoder's states of padding, which published
    weights attend to), or null (not at all)."""
    pooled_size: int = bounded(2048, most=2**20)
    """Width of `pooled_text`, the concatenated pooled outputs of two CLIP encoders for a
    caption."""
    qk_norm: bool = False
    """Whether queries and keys are normalised (3.5)."""
    dual_attention_layers: int = 0
    """Number of layers, from the first on, with a second attention among latents only (3.5 medium:
    13)."""
    max_size: tuple[int, int, int] = bounded((1, 384, 384), most=2**12, least=None)
    """Latent frames (1), rows and columns that the table of positions covers; rows and columns must
    be equal."""
    sample_size: int = bounded(128, most=2**12)
    """Number of latent rows over which positions in a new table increase by 1 per token."""

    own_stages = ModelConfig.enough_layers

    def own_sizes(self) -> list[Rule]:
        frames, rows, columns = self.max_size
        return [
            (
                0 <= self.dual_attention_layers <= max(self.num_layers, 0),
                f"dual_attention_layers={self.dual_attention_layers} must be between 0 and"
                f" num_layers={self.num_layers}",
            ),
            (
                frames == 1 and rows == columns >= 1,
                f"max_size={list(self.max_size)} must be [1, N, N]: the table of positions is"
                " square and has one frame",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        return [
            learns_pictures(self, "SD3"),
            (
                self.max_size[1] % self.patch_spatial == 0,
                f"max_size={list(self.max_size)} must have rows and columns that are multiples of"
                f" patch_spatial={self.patch_spatial}",
            ),
            (
                self.sample_size >= self.patch_spatial,
                f"sample_size={self.sample_size} must be at least"
                f" patch_spatial={self.patch_spatial}",
            ),
            (
                self.hidden_size % 4 == 0,
                f"hidden_size={self.hidden_size} must be a multiple of 4: an embedding of a"
                " position has equally many sines and cosines of the row and of the column",
            ),
        ]

    @property
    def table_side(self) -> int:
        """Number of rows and of columns of the table of positions, in tokens."""
        return self.max_size[1] // self.patch_spatial

    @property
    def stack_layers(self) -> dict[str, int]:
        """Number of layers of each stack by name, in the order of the network.

        The last layer is a separate stack.
        """
        dual = min(self.dual_attention_layers, self.num_layers - 1)
        counts = {"dual_blocks": dual, "blocks": self.num_layers - 1 - dual, "last_block": 1}
        return {name: count for name, count in counts.items() if count}

    @property
    def largest_latent(self) -> tuple[int, int, int] | None:
        return self.max_size

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        return [*sizes, self.crossattn_emb_size, self.dual_attention_layers]


def _positions(model: Sd3Config) -> PositionRule:
    return resolve_name("dit.models.positions:CroppedPositions")(model.table_side)


def _inputs(model: Sd3Config) -> tuple[SampleInput, ...]:
    text = text_input(model, encoder="sd3", may_be_empty=True)
    return (text, pooled_input(model, encoder="sd3"))


def sd3_stacks(model: Sd3Config) -> tuple[StackSpec, ...]:
    """The specifications of the stacks: layers with a second attention, others, and the last."""
    layers = {
        "dual_blocks": _layer(model, dual=True),
        "blocks": _layer(model, dual=False),
        "last_block": _layer(model, dual=ends_dual(model), last=True),
    }
    counts = model.stack_layers.items()
    return tuple(StackSpec(name=name, count=n, layer=layers[name]) for name, n in counts)


def _layer(model: Sd3Config, *, dual: bool, last: bool = False) -> LayerSpec:
    """A double-stream layer; with `dual`, it has a second attention, among latents only.

    The two attentions are in parallel. The `last` layer outputs no text.
    """
    parts = joint_layer_parts(model, norm=QkNorm.PER_HEAD if model.qk_norm else QkNorm.NONE)
    attention, mlp = parts["attention"], parts["feed_forward"]
    m, t = (Modulation(n, PerBlockModulation()) for n in ("modulation", "text_modulation"))
    text = Port(TEXT_TOKENS, "text_attention", t[0], writes=not last)
    both = Attend(Port(TOKENS, "attention", m[0]), attention, text)
    second = Attend(Port(TOKENS, "second_attention", m[2]), attention)
    of_text = Feed(Port(TEXT_TOKENS, "text_mlp", t[1]), mlp)
    attends = (both, second) if dual else both
    steps = (attends, Feed(Port(TOKENS, "mlp", m[1]), mlp), of_text)
    return LayerSpec(steps[:2] if last else steps)


def ends_dual(model: Sd3Config) -> bool:
    """Whether the last layer of `model` has a second attention, too."""
    return model.dual_attention_layers == model.num_layers


FAMILY = Family(
    name="sd3",
    config=Sd3Config,
    network=imported("dit.models.sd3.model:Sd3Network"),
    spec=lambda model: NetworkSpec(stacks=sd3_stacks(model)),
    parts=JOINT_PARTS,
    diffusers=imported("dit.models.sd3.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(zero=ADALN_ZERO, fixed=(TABLE,)),
    objective=ObjectiveConventions(
        settings={"name": "flow"},
        of_size={
            size: {"flow_shift": 3.0} for size in MODEL_SIZES
        },  # from the published schedulers
        clean_level=None,
    ),
    vae=lambda _: "sd3",
    tiny=TINY,
)
