"""The family `dit`, the DiT with Cosmos's arithmetic: its fields, sizes, rules and layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded, positive
from dit.models.family import (
    TINY_NETWORK,
    Family,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    text_input,
)
from dit.models.layer_spec import (
    TOKENS,
    Attend,
    AttendTo,
    AttentionSpec,
    FamilyModulation,
    Feed,
    FeedForwardSpec,
    KeyRows,
    LayerPart,
    LayerSpec,
    Modulation,
    NetworkSpec,
    Port,
    StackSpec,
)
from dit.models.registry import imported
from dit.token_ids import DIGITS, MOST_TOKENS, TOKEN_IDS

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

MOST_CONDITIONER_LAYERS = 64


class ExtraPosition(StrEnum):
    """Whether learnable positions are added before every layer (Cosmos 1)."""

    NONE = "none"
    LEARNABLE = "learnable"


class TextConditioner(StrEnum):
    """Whether Anima's conditioner processes the text encoder's states, and where."""

    NONE = "none"  # no conditioner: shards hold the text encoder's states
    STORED = "stored"  # before training: shards hold the conditioner's outputs
    TRAINED = "trained"  # in the network: shards hold the conditioner's inputs


_COSMOS = {
    "adaln_lora_dim": 256,
    "in_channels": 16,
    "crossattn_emb_size": 1024,
    "text_pad_to": 512,
    "rope_scale": (2.0, 1.0, 1.0),
    "extra_pos_embed": ExtraPosition.LEARNABLE,
    "concat_padding_mask": True,
}

# Cosmos-Predict2 has the layers of Cosmos 1 without learnable positions. Its video networks take
# given frames. Predict2.5 projects the states of all layers of its text encoder. Their padding is
# not zero, so shards contain it. No pipeline passes a frame rate to Predict2.5.
_PREDICT2 = {**_COSMOS, "extra_pos_embed": ExtraPosition.NONE, "rope_scale": (1.0, 4.0, 4.0)}
_PREDICT2_VIDEO = {**_PREDICT2, "condition_mask": True, "rope_scale": (1.0, 3.0, 3.0)}
_PREDICT2_5 = {
    **_PREDICT2_VIDEO,
    "crossattn_emb_size": 100_352,
    "crossattn_proj_size": 1024,
    "text_pad_to": None,
    "base_fps": None,
}
CLEAN_LEVEL = 1e-4
"""Noise level t of given frames in Predict2.5: `conditional_frame_timestep` of its pipeline.
Predict2 uses sigma = 1e-4 (`sigma_conditioning`), that is t = 0.9999e-4."""

_2B = {"num_layers": 28, "hidden_size": 2048, "num_attention_heads": 16}
_14B = {"num_layers": 36, "hidden_size": 5120, "num_attention_heads": 40}

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "dit_s": {"num_layers": 12, "hidden_size": 384, "num_attention_heads": 6},
    "dit_b": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "dit_l": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "dit_xl": {"num_layers": 28, "hidden_size": 1152, "num_attention_heads": 16},
    "cosmos_7b": {"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, **_COSMOS},
    "cosmos_14b": {**_14B, **_COSMOS, "rope_scale": (2.0, 2.0, 2.0)},
    "cosmos_predict2_2b": {**_2B, **_PREDICT2},
    "cosmos_predict2_14b": {**_14B, **_PREDICT2},
    "cosmos_predict2_2b_video2world": {**_2B, **_PREDICT2_VIDEO},
    "cosmos_predict2_14b_video2world": {
        **_14B,
        **_PREDICT2_VIDEO,
        "rope_scale": (20 / 24, 2.0, 2.0),
    },
    "cosmos_predict2.5_2b": {**_2B, **_PREDICT2_5},
    "cosmos_predict2.5_14b": {**_14B, **_PREDICT2_5},
    "anima": {**_2B, **_PREDICT2, "text_conditioner": TextConditioner.STORED},
}
"""Fields of `model` by size name.

DiT: arXiv:2212.09748, Table 1. Cosmos: TRANSFORMER_CONFIGS of Diffusers'
scripts/convert_cosmos_to_diffusers.py ("Cosmos-1.0-Diffusion-7B-Text2World" and "-14B-",
"Cosmos-2.0-Diffusion-2B-Text2Image", "-2B-Video2World" and so on, "Cosmos-2.5-Predict-Base-2B" and
"-14B"); captions are padded to 512 tokens, the `max_sequence_length` of the pipelines. Anima:
scripts/convert_anima_to_diffusers.py, with the network of "Cosmos-2.0-Diffusion-2B-Text2Image".
"""

_TINY = {
    **TINY_NETWORK,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "adaln_lora_dim": 8,
    "crossattn_emb_size": 16,
}
_PROJECTED = {**_TINY, "crossattn_emb_size": 24, "crossattn_proj_size": 16}
TINY: Mapping[str, Mapping[str, Any]] = {
    "dit_s": _TINY,
    "cosmos_7b": {**_TINY, "text_pad_to": 12, "max_size": (8, 16, 16)},
    "cosmos_predict2_2b": {**_TINY, "text_pad_to": 12},
    "cosmos_predict2_2b_video2world": {**_TINY, "text_pad_to": 12},
    "cosmos_predict2.5_2b": _PROJECTED,
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""

PREDICT2_OBJECTIVE: Mapping[str, Any] = {"name": "flow", "timestep_scale": 1.0}
"""Keys of `objective` that the pipelines of Cosmos-Predict2 and 2.5 determine.

Predict2's state is data + sigma * noise. With t = sigma / (1 + sigma), the network gets the
timestep t and (1 - t) * state, and the predicted data are (1 - t) * state - t * output. This is
flow matching with output = noise - data.
"""
# How many latent frames were given in training: `min_num_conditional_frames` 1 and `max_` 2 of
# Cosmos-Predict2's video2world, `conditional_frames_probs` {0: .5, 1: .25, 2: .25} of 2.5.
_GIVEN = {"2_2b_video2world": (0, 1, 1), "2_14b_video2world": (0, 1, 1)}
_GIVEN |= {"2.5_2b": (2, 1, 1), "2.5_14b": (2, 1, 1), "2_2b": None, "2_14b": None}
OBJECTIVES_OF_SIZES: Mapping[str, Mapping[str, Any]] = {
    f"cosmos_predict{size}": {**PREDICT2_OBJECTIVE, "given_frames": frames}
    for size, frames in _GIVEN.items()
} | {"anima": {**PREDICT2_OBJECTIVE, "sampling_levels": "even", "flow_shift": 3.0}}
"""Keys of `objective` that each named size sets."""


@dataclass(frozen=True, kw_only=True)
class DitConfig(ModelConfig):
    """Keys of `model`: sizes, positions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    shown_before: ClassVar[Mapping[str, str]] = {
        "adaln_lora_dim": "in_channels",
        "crossattn_proj_size": "text_pad_to",
    }

    name: str = "dit_xl"
    """A named size (dit_s, _b, _l, _xl, cosmos_7b, cosmos_predict2_2b, others) or `custom`."""
    family: str = "dit"
    num_layers: int = 28
    hidden_size: int = 1152
    num_attention_heads: int = 16
    adaln_lora_dim: int = bounded(256, most=2**17)
    """Rank of each low-rank adaLN modulation."""
    text_pad_to: int | None = None
    """Number of tokens to which captions are padded with zeros (Cosmos: 512); null: no padding."""
    crossattn_proj_size: int | None = bounded(None, most=2**20)
    """Width of the text after a projection, a linear with bias and GELU (Cosmos 2.5); null: no
    projection. With text_conditioner=trained it is the width of the conditioner's output instead;
    null: the width of its input states."""
    text_conditioner: TextConditioner = TextConditioner.NONE
    """Anima's conditioner, a small network that processes captions: stored (shards hold its
    outputs), trained (shards hold its inputs, and it is part of the network), or none (shards hold
    the states of a text encoder)."""
    conditioner_layers: int = bounded(6, most=MOST_CONDITIONER_LAYERS)
    """Number of layers of a trained conditioner."""
    conditioner_size: int = bounded(1024, most=2**17)
    """Hidden size of a trained conditioner."""
    conditioner_heads: int = bounded(16, most=2**10)
    """Attention heads of a trained conditioner."""
    conditioner_mlp_ratio: float = bounded(4.0, most=1e3, least=None)
    """Width of a trained conditioner's MLPs divided by its hidden size."""
    conditioner_vocabulary: int = bounded(32128, most=MOST_TOKENS)
    """Number of token ids that a trained conditioner has an embedding for (T5: 32128)."""
    rope_scale: tuple[float, float, float] = bounded((1.0, 1.0, 1.0), most=1e6, least=None)
    """NTK scale of the rotary frequencies for frames, rows and columns."""
    base_fps: float | None = bounded(24.0, most=1e6, least=None)
    """Frame rate for rotary positions: a frame's position is frame * base_fps / fps of the clip;
    null: its index (Cosmos 2.5)."""
    extra_pos_embed: ExtraPosition = ExtraPosition.NONE
    """Learnable positions added before every layer, in addition to rotary ones (Cosmos:
    learnable)."""
    max_size: tuple[int, int, int] = bounded((128, 240, 240), most=2**16)
    """Latent frames, rows and columns that learnable positions cover."""
    concat_padding_mask: bool = False
    """Whether to append Cosmos's padding-mask channel (always zero) to the latent."""
    condition_mask: bool = False
    """Whether samples may have given first frames; an appended channel of the latent is 1 on given
    frames (Cosmos video2world)."""

    def own_sizes(self) -> list[Rule]:
        return [
            *positive(self, "base_fps", "conditioner_mlp_ratio"),
            (min(self.rope_scale) > 0, f"rope_scale={self.rope_scale} must be positive"),
        ]

    def own_shapes(self) -> list[Rule]:
        heads, width = self.num_attention_heads, self.hidden_size // self.num_attention_heads
        return [
            (
                self.hidden_size % heads > 0 or (width % 2 == 0 and width // 6 >= 2),
                f"hidden_size={self.hidden_size} / num_attention_heads={heads} gives heads of"
                f" width {width}; 3-D rotary positions need an even width of at least 12",
            ),
            (
                not self.condition_mask or self.patch_temporal == 1,
                f"condition_mask=true marks single latent frames as given, so a token must not"
                f" cover several frames; change patch_temporal={self.patch_temporal} to 1",
            ),
            (
                self.text_conditioner is not TextConditioner.STORED
                or self.crossattn_proj_size is None,
                f"text_conditioner={self.text_conditioner} and crossattn_proj_size="
                f"{self.crossattn_proj_size} belong to different networks; set"
                " crossattn_proj_size=null or text_conditioner=none",
            ),
            (
                self.conditioner_size % (2 * self.conditioner_heads) == 0,
                f"conditioner_size={self.conditioner_size} / conditioner_heads="
                f"{self.conditioner_heads} gives heads of width"
                f" {self.conditioner_size / self.conditioner_heads:g}, which must be even",
            ),
        ]

    @property
    def learnable_positions(self) -> bool:
        return self.extra_pos_embed is ExtraPosition.LEARNABLE

    @property
    def projects_text(self) -> bool:
        return self.crossattn_proj_size is not None and not self.trains_conditioner

    @property
    def trains_conditioner(self) -> bool:
        return self.text_conditioner is TextConditioner.TRAINED

    @property
    def conditions_text(self) -> bool:
        return self.text_conditioner is not TextConditioner.NONE

    @property
    def text_width(self) -> int:
        """Width of the text states to which the layers attend."""
        return self.crossattn_proj_size or self.crossattn_emb_size

    def text_in(self, batch: Any) -> Sequence[int]:
        """Number of text states of each sample of `batch` to which the layers attend.

        With a trained conditioner this is the number of token ids.
        """
        if not self.trains_conditioner:
            return batch.text_rows
        return [stop - first for first, stop in pairwise(batch.text_offsets[TOKEN_IDS])]

    @property
    def mask_features(self) -> int:
        """Number of input features of a token that hold the condition mask and the padding mask."""
        return self.patch_volume * (self.condition_mask + self.concat_padding_mask)

    @property
    def largest_latent(self) -> tuple[int, int, int] | None:
        return self.max_size if self.learnable_positions else None

    @property
    def cost_sizes(self) -> list[int]:
        layers, width, ffn, text = super().cost_sizes
        sizes = [layers, width, ffn, self.adaln_lora_dim, text]
        more = [self.conditioner_layers, self.conditioner_size, self.conditioner_mlp_ratio]
        return sizes + [int(one) for one in more] * self.trains_conditioner


def _positions(model: DitConfig) -> PositionRule:
    return resolve_name("dit.models.positions:GridPositions")(model.base_fps)


def _vae(model: DitConfig) -> str:
    """The name of the network's VAE in `dit.codecs`.

    Predict2 differs from Cosmos 1 by having no learnable positions. DiTs that are no Cosmos size
    use the VAE of Cosmos 1.
    """
    if model.conditions_text:
        return _text_encoder(model)
    if model.projects_text:
        return "cosmos_predict25"
    is_predict2 = model.concat_padding_mask and not model.learnable_positions
    return "cosmos_predict2" if is_predict2 else "cosmos"


_CONDITIONED = {TextConditioner.STORED: "anima", TextConditioner.TRAINED: "anima_states"}
"""Name in `dit.codecs` of Anima's VAE and text encoder, by `model.text_conditioner`."""


def _text_encoder(model: DitConfig) -> str:
    if model.conditions_text:
        return _CONDITIONED[model.text_conditioner]
    return "cosmos_predict25" if model.projects_text else "cosmos"


def _inputs(model: DitConfig) -> tuple[SampleInput, ...]:
    encoder = _text_encoder(model)
    text = text_input(model, encoder=encoder)
    if model.conditions_text:
        each = {name: f"model.text_conditioner={key}" for key, name in _CONDITIONED.items()}
        others = {name: setting for name, setting in each.items() if name != encoder}
        text = replace(text, refused_encoders=others)
    texts = (text,)
    if model.trains_conditioner:
        ids = model.conditioner_vocabulary
        of_ids: Any = {"width": DIGITS, "vocabulary": ids, "encoder": encoder}
        texts += (SampleInput(name=TOKEN_IDS, kind=InputKind.TEXT, **of_ids),)
    if not model.condition_mask:
        return texts
    frames = SampleInput(
        name="first_frame_latent",
        kind=InputKind.FRAMES,
        width=model.in_channels,
        required=False,
        pictures=1,
    )
    return *texts, frames


@dataclass(frozen=True)
class LowRankModulation(FamilyModulation):
    """Low-rank adaLN modulation of Cosmos (`adaln_lora_dim`).

    Each part of a layer has two linears, D -> rank -> 3 D, whose output is added to a vector that
    all layers share.
    """

    runs: ClassVar[str] = "dit.models.dit.model:LowRankAdaLN"
    rank: int


def dit_stack(model: DitConfig) -> StackSpec:
    """The specification of the DiT's layers."""
    width = model.hidden_size
    # eps as in Diffusers' attention; Diffusers' other norms have another value.
    attention = AttentionSpec(width=width, heads=model.num_attention_heads, eps=1e-5)

    def port(module: str, modulation: str) -> Port:
        return Port(TOKENS, module, Modulation(modulation, low_rank)[0])

    feed_forward = FeedForwardSpec(width=width, hidden=model.ffn_hidden_size)
    low_rank, text = LowRankModulation(model.adaln_lora_dim), KeyRows(model.text_width)
    steps: tuple[LayerPart, ...] = (
        Attend(port("self_attention", "modulate_self"), attention),
        AttendTo(port("cross_attention", "modulate_cross"), attention, (text,)),
        Feed(port("mlp", "modulate_mlp"), feed_forward),
    )
    if model.learnable_positions:
        steps = (AddPositions(Port(TOKENS)), *steps)
    return StackSpec(name="decoder", count=model.num_layers, layer=LayerSpec(steps))


@dataclass(frozen=True)
class AddPositions(LayerPart):
    """Adds learnable positions to the tokens before every layer (Cosmos)."""

    runs: ClassVar[str] = "dit.models.dit.model:AddingPositions"


def _spec(model: DitConfig) -> NetworkSpec:
    return NetworkSpec(
        stacks=(dit_stack(model),),
        trains_conditioner=model.trains_conditioner,
        text_tokens=model.text_pad_to,
    )


FAMILY = Family(
    name="dit",
    config=DitConfig,
    network=imported("dit.models.dit.model:DiT"),
    spec=_spec,
    parts={
        "self_attention": "attention",
        "cross_attention": "cross_attention",
        "mlp": "mlp",
        "modulate_self": "modulation",
        "modulate_cross": "modulation",
        "modulate_mlp": "modulation",
        "modulate_out": "head",
        "proj_out": "head",
    },
    diffusers=imported("dit.models.dit.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(
        # Each layer starts as the identity (adaLN-Zero, arXiv:2212.09748, Sec. 3.2), and the output
        # of the network as 0.
        zero=("*proj_out.weight", "*modulate*linear_2*"),
        no_decay=("*pos_emb_*", "*conditioner.embed.*"),
    ),
    objective=ObjectiveConventions(clean_level=CLEAN_LEVEL, of_size=OBJECTIVES_OF_SIZES),
    vae=_vae,
    tiny=TINY,
)
