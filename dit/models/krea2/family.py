"""The family `krea2`, Krea 2: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from dit.config import ContextComm, ModelConfig
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
    key_heads_divide,
    learns_pictures,
    sequential_layer,
)
from dit.models.layer_spec import (
    MOST_REFINER_LAYERS,
    TEXT_TOKENS,
    Activation,
    Attend,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    Modulation,
    NetworkSpec,
    NormKind,
    RowNorm,
    StackSpec,
    TableModulation,
)
from dit.models.registry import imported

EPS = 1e-5
THETA = 1000.0
"""Base of the rotary frequencies for rows and columns."""
VECTORS: Mapping[str, int] = {"blocks": 6}
"""Number of modulation vectors that all layers share; each layer adds its own table to them."""
TITLE = "Krea 2"

MODEL_SIZES: dict[str, dict[str, Any]] = {"krea2_raw": {}, "krea2_turbo": {}}
"""Fields of `model` by size name, from config.json of krea/Krea-2-Raw and of Krea-2-Turbo."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "krea2_raw": {
        **TINY_NETWORK,
        "hidden_size": 96,
        "num_attention_heads": 12,
        "num_kv_heads": 4,
        "mlp_ratio": 1.0,
        "crossattn_emb_size": 48,
        "num_text_layers": 3,
        "text_heads": 4,
        "text_kv_heads": 4,
        "text_mlp_size": 12,
        "num_fusion_layers": 1,
        "num_refiner_layers": 1,
        "rope_axes": (2, 2, 4),
    }
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class Krea2Config(ModelConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    shown_before: ClassVar[Mapping[str, str]] = {"num_kv_heads": "mlp_ratio"}

    name: str = "krea2_raw"
    """A named size (krea2_raw, krea2_turbo) or `custom`."""
    family: str = "krea2"
    num_layers: int = 28
    """Number of layers; each computes latents and text jointly."""
    hidden_size: int = 6144
    num_attention_heads: int = 48
    """Number of query heads."""
    num_kv_heads: int = bounded(12, most=2**14)
    """Number of key and value heads. Each serves num_attention_heads / num_kv_heads query heads;
    tensor_model_parallel_size must divide their number."""
    mlp_ratio: float = 16384 / 6144
    crossattn_emb_size: int = 30720
    """Width of the text in the shards: all hidden states of a token, concatenated."""
    num_text_layers: int = bounded(12, most=2**10)
    """Number of hidden states of each text token, from several layers of the text encoder."""
    num_fusion_layers: int = bounded(2, most=MOST_REFINER_LAYERS)
    """Number of layers in which the hidden states of each text token attend to each other."""
    num_refiner_layers: int = bounded(2, most=MOST_REFINER_LAYERS)
    """Number of layers in which text tokens attend to each other, after their states are fused."""
    text_heads: int = bounded(20, most=2**14)
    """Number of query heads in the layers over text."""
    text_kv_heads: int = bounded(20, most=2**14)
    """Number of key and value heads in the layers over text."""
    text_mlp_size: int = bounded(6912, most=2**20)
    """Width of the MLPs in the layers over text."""
    rope_axes: tuple[int, int, int] = bounded((32, 48, 48), most=2**17, least=None)
    """Widths of a head rotated by frame, row and column; their sum is the head's width."""

    def own_sizes(self) -> list[Rule]:
        return [
            even_axes(self),
            learns_pictures(self, TITLE),
            attends_to_no_padding(self, TITLE),
        ]

    def own_shapes(self) -> list[Rule]:
        return [axes_fill_heads(self), *key_heads_divide(self), *self._text_shapes()]

    def _text_shapes(self) -> list[Rule]:
        states, heads, keys = self.num_text_layers, self.text_heads, self.text_kv_heads
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        exchanged = cp > 1 and self.cp_comm_type is ContextComm.A2A
        return [
            (
                self.crossattn_emb_size % (states * heads) == 0,
                f"crossattn_emb_size={self.crossattn_emb_size} must be a multiple of"
                f" num_text_layers={states} * text_heads={heads} = {states * heads}",
            ),
            (
                heads % keys == 0,
                f"text_kv_heads={keys} must divide text_heads={heads}: each key head serves equally"
                " many query heads",
            ),
            (
                keys % tp == 0 and self.text_mlp_size % tp == 0,
                f"tensor_model_parallel_size={tp} must divide both text_kv_heads={keys} and"
                f" text_mlp_size={self.text_mlp_size}, which are distributed over tensor ranks",
            ),
            (
                not exchanged or heads % (tp * cp) == 0,
                f"cp_comm_type=a2a distributes text_heads={heads} over tensor_model_parallel_size="
                f"{tp} * context_parallel_size={cp} = {tp * cp} ranks, but {heads} is not a"
                f" multiple of {tp * cp}; set cp_comm_type=all_gather",
            ),
        ]

    @property
    def text_width(self) -> int:
        """Width of one hidden state of a text token."""
        return self.crossattn_emb_size // self.num_text_layers

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        return [*sizes, self.num_kv_heads, self.crossattn_emb_size, self.text_mlp_size]


@dataclass(frozen=True)
class AttendGated(Attend):
    """Attention with an output gate, and with `CentredNorm`s of queries and keys.

    The gate is sigmoid(linear(x)) of the attention's input x.
    """

    runs: ClassVar[str] = "dit.models.krea2.attention:AttendingGated"
    states: int | None = None
    """Number of rows (hidden states) of each token, which attend only to each other. None: a token
    has one row and attends to all tokens of its sample."""


def _layer(
    width: int, *, heads: int, groups: int, hidden: int, states: int | None = None, **more: Any
) -> LayerSpec:
    attention = AttentionSpec(width=width, heads=heads, groups=groups, eps=EPS)
    mlp = FeedForwardSpec(width=width, hidden=hidden, activation=Activation.SWIGLU)
    norm = RowNorm("norm", NormKind.CENTRED, EPS)
    attend = partial(AttendGated, states=states)
    return sequential_layer(attention, mlp, norm=norm, attend=attend, **more)


def krea2_stack(model: Krea2Config) -> StackSpec:
    """The specification of the layers over latents and text."""
    sizes: Any = {"heads": model.num_attention_heads, "groups": model.num_kv_heads}
    sizes |= {"hidden": model.ffn_hidden_size}
    layer = _layer(
        model.hidden_size, modulation=Modulation("modulation", TableModulation()), **sizes
    )
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


def fusion_layers(model: Krea2Config) -> tuple[LayerSpec, LayerSpec]:
    """Two layers over text: of the hidden states of each token, and of all tokens of a caption."""
    sizes: Any = {"heads": model.text_heads, "groups": model.text_kv_heads}
    sizes |= {"hidden": model.text_mlp_size, "row": TEXT_TOKENS, "modulation": None}
    states, tokens = (
        _layer(model.text_width, states=count, **sizes) for count in (model.num_text_layers, None)
    )
    return states, tokens


def _spec(model: Krea2Config) -> NetworkSpec:
    return NetworkSpec(stacks=(krea2_stack(model),), text_layers="text_fusion.")


def _inputs(model: Krea2Config) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder="krea2"),)


_BY_TOKENS = {
    **{"time_shift_type": "exponential", "base_shift": 0.5, "max_shift": 1.15},
    "max_image_seq_len": 6400,
}
SAME_FOR_ALL = {"base_shift": 1.15, "max_shift": 1.15}
"""Keys of `objective` for Turbo, whose pipeline uses one shift for all picture sizes."""

FAMILY = Family(
    name="krea2",
    config=Krea2Config,
    network=imported("dit.models.krea2.model:Krea2Network"),
    spec=_spec,
    parts={"text_fusion": "text", **JOINT_PARTS},
    diffusers=imported("dit.models.krea2.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,
    # Like `ADALN_ZERO`; the tables of the layers are zero, too.
    weights=WeightRules(
        zero=("modulations.*.weight", "*modul*.table", "proj_out.weight"), no_decay=("*.table",)
    ),
    objective=ObjectiveConventions(
        settings=EVEN_STEPS,
        of_size={"krea2_raw": _BY_TOKENS, "krea2_turbo": _BY_TOKENS | SAME_FOR_ALL},
        clean_level=None,
    ),
    vae=lambda _: "krea2",
    distilled=("krea2_turbo",),
    tiny=TINY,
)
