"""The family `wan`, Wan 2.1 and 2.2: its fields, sizes, rules, inputs and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

from dit.config import ContextComm, ModelConfig
from dit.config.checks import Rule, bounded
from dit.config.resume import Live
from dit.config.sparsity import CUBE_TOKENS, SparseSchedule
from dit.models.family import (
    TINY_NETWORK,
    Family,
    InputKind,
    NullInput,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    text_input,
)
from dit.models.layer_spec import (
    TOKENS,
    Activation,
    Attend,
    AttendTo,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    KeyRows,
    LayerSpec,
    Modulation,
    NetworkSpec,
    NormKind,
    Port,
    QkNorm,
    RowNorm,
    StackSpec,
    TableModulation,
)
from dit.models.registry import imported

CONDITION, IMAGE, FIRST_FRAME = "condition_latent", "image_embed", "first_frame_latent"

MASK_CHANNELS = 4
"""Number of channels of the mask of given frames: one for each video frame of a latent frame."""


class ImageCondition(StrEnum):
    """How the network gets given pictures."""

    NONE = "none"  # not at all: text-to-video
    FIRST_FRAME = "first_frame"  # a mask and `condition_latent` as additional channels
    FIRST_AND_LAST_FRAME = "first_and_last_frame"  # the same, with the last frame given, too
    CLEAN_FIRST_FRAME = "clean_first_frame"  # `first_frame_latent` replaces the first frame


_SMALL = {"num_layers": 30, "hidden_size": 1536, "num_attention_heads": 12}
_LARGE = {
    "num_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "mlp_ratio": 13824 / 5120,
}
_CLIP = {"image_embed_size": 1280, "image_embed_length": 257}

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "wan2.1_t2v_1.3b": {**_SMALL, "mlp_ratio": 8960 / 1536},
    "wan2.1_t2v_14b": _LARGE,
    "wan2.1_i2v_14b": {**_LARGE, **_CLIP, "image_condition": ImageCondition.FIRST_FRAME},
    "wan2.1_flf2v_14b": {
        **_LARGE,
        **_CLIP,
        "image_condition": ImageCondition.FIRST_AND_LAST_FRAME,
        "image_embed_length": 514,
        "image_embed_positions": True,
    },
    "wan2.2_t2v_a14b": _LARGE,
    "wan2.2_i2v_a14b": {**_LARGE, "image_condition": ImageCondition.FIRST_FRAME},
    "wan2.2_ti2v_5b": {
        "num_layers": 30,
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "mlp_ratio": 14336 / 3072,
        "in_channels": 48,
        "image_condition": ImageCondition.CLEAN_FIRST_FRAME,
    },
}
"""Fields of `model` by size name, from TRANSFORMER_CONFIGS of Diffusers'
scripts/convert_wan_to_diffusers.py. A wan2.2 size with a14b is one of two experts."""
_TINY = {
    **TINY_NETWORK,
    "hidden_size": 48,
    "mlp_ratio": 1.5,
    "crossattn_emb_size": 16,
    "text_pad_to": 12,
    "freq_dim": 16,
}
_TINY_CLIP = {**_TINY, "image_embed_size": 10}
TINY: Mapping[str, Mapping[str, Any]] = {
    "wan2.1_t2v_1.3b": _TINY,
    "wan2.1_i2v_14b": {**_TINY_CLIP, "image_embed_length": 5},
    "wan2.1_flf2v_14b": {**_TINY_CLIP, "image_embed_length": 6, "text_pad_to": None},
    "wan2.2_i2v_a14b": _TINY,
    "wan2.2_ti2v_5b": _TINY,
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class WanConfig(ModelConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "wan2.1_t2v_1.3b"
    """A named size (wan2.1_t2v_1.3b, wan2.2_ti2v_5b, ...) or `custom`."""
    family: str = "wan"
    num_layers: int = 30
    hidden_size: int = 1536
    num_attention_heads: int = 12
    mlp_ratio: float = 8960 / 1536
    """Width of the MLP divided by the hidden size; the width is rounded to the nearest integer."""
    crossattn_emb_size: int = 4096
    text_pad_to: int | None = 512
    """Number of tokens to which captions are padded with zeros, to which layers attend (Wan: 512);
    null: no padding."""
    freq_dim: int = bounded(256, most=2**17)
    """Width of the sinusoidal embedding of the timestep."""
    image_condition: ImageCondition = ImageCondition.NONE
    """How the network gets given pictures: none, first_frame, first_and_last_frame or
    clean_first_frame."""
    image_embed_size: int | None = bounded(None, most=2**20)
    """Width of `image_embed`, the states of an image encoder for given pictures (1280); null: the
    network gets none."""
    image_embed_length: int = bounded(257, most=2**20)
    """Number of states in `image_embed` of each sample: 257 for CLIP's ViT-H, 514 for two
    pictures."""
    image_embed_positions: bool = False
    """Whether learned positions are added to `image_embed` (first and last frame: true)."""
    sparse_attention: bool = False
    """Whether attention is Video Sparse Attention (VSA): each cube of 4 x 4 x 4 tokens attends to
    the tokens of some cubes and, through a learned gate, to the means of all cubes."""
    sparse_share: Live[float] = 0.1
    """Final fraction of a sample's cubes to whose tokens a cube attends; 1: all cubes."""
    sparse_share_step: Live[float] = 0.03
    """Decrease of the fraction of cubes per interval, which starts at 1; with 1, sparse_share
    applies from the first step on."""
    sparse_share_interval: Live[int] = bounded(50, most=2**31 - 1)
    """Number of training steps between two decreases of the fraction of cubes."""

    def own_sizes(self) -> list[Rule]:
        return [
            *self._shares(),
            (
                self.image_embed_size is not None or not self.image_embed_positions,
                "image_embed_positions=true needs image_embed_size; set"
                " image_embed_positions=false",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        heads, width = self.num_attention_heads, self.hidden_size // self.num_attention_heads
        return [
            (
                self.hidden_size % heads > 0 or (width % 2 == 0 and width >= 6),
                f"hidden_size={self.hidden_size} / num_attention_heads={heads} gives heads of"
                f" width {width}; 3-D rotary positions need an even width of at least 6",
            ),
        ]

    def _shares(self) -> list[Rule]:
        """Rules for the fields of sparse attention."""
        ranks, comm, named = self.context_parallel_size, self.cp_comm_type, "sparse_attention=true"
        shares = [
            (0 < value <= 1, f"{key}={value} must be above 0 and at most 1")
            for key in ("sparse_share", "sparse_share_step")
            for value in (getattr(self, key),)
        ]
        return [
            *shares,
            (
                not self.sparse_attention or ranks == 1 or comm is ContextComm.A2A,
                f"{named} needs all tokens of a sample on each rank, but with cp_comm_type={comm} a"
                " rank has only some of the queries; set cp_comm_type=a2a",
            ),
            (
                not self.sparse_attention or self.token_route is None,
                f"{named} needs whole cubes of tokens, but token routing (route_from="
                f"{self.route_from}) leaves tokens out; set route_from=null and route_to=null",
            ),
        ]

    @property
    def share_schedule(self) -> SparseSchedule:
        """The schedule of the fraction of cubes to which each cube attends."""
        step, interval = self.sparse_share_step, self.sparse_share_interval
        return SparseSchedule.of(self.sparse_share, step=step, interval=interval)

    @property
    def whole_samples_by(self) -> str | None:
        return "model.sparse_attention=true" if self.sparse_attention else None

    def at_step(self, step: int) -> Self:
        return replace(self, sparse_share=float(self.share_schedule.at(step)))

    @property
    def ffn_hidden_size(self) -> int:
        """Width of the MLP, rounded to the nearest integer."""
        return round(self.hidden_size * self.mlp_ratio)

    @property
    def condition_channels(self) -> int:
        """Number of input channels besides the noisy latent: a mask, then `condition_latent`."""
        shown = (ImageCondition.FIRST_FRAME, ImageCondition.FIRST_AND_LAST_FRAME)
        return MASK_CHANNELS + self.in_channels if self.image_condition in shown else 0

    @property
    def input_features(self) -> int:
        """Number of input features of a token."""
        return (self.in_channels + self.condition_channels) * self.patch_volume

    @property
    def image_rows(self) -> int | None:
        """Number of image states of each sample; None if the network gets no image states."""
        return None if self.image_embed_size is None else self.image_embed_length

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        sizes += [self.crossattn_emb_size, self.input_features, self.image_rows or 0]
        return [*sizes, 1] if self.sparse_attention else sizes


def _inputs(model: WanConfig) -> tuple[SampleInput, ...]:
    found = [text_input(model, encoder="wan")]
    pictures = 2 if model.image_condition is ImageCondition.FIRST_AND_LAST_FRAME else 1
    if model.condition_channels:
        found.append(
            SampleInput(
                name=CONDITION,
                kind=InputKind.CHANNELS,
                width=model.in_channels,
                pictures=pictures,
            )
        )
    if model.image_embed_size is not None:
        found.append(
            SampleInput(
                name=IMAGE,
                kind=InputKind.TEXT,
                width=model.image_embed_size,
                rows=model.image_embed_length,
                null=NullInput.KEPT,
                pictures=pictures,
            )
        )
    if model.image_condition is ImageCondition.CLEAN_FIRST_FRAME:
        given: Any = {"width": model.in_channels, "required": False, "pictures": pictures}
        found.append(SampleInput(name=FIRST_FRAME, kind=InputKind.FRAMES, **given))
    return tuple(found)


def wan_stack(model: WanConfig) -> StackSpec:
    """The specification of Wan's layers."""
    width = model.hidden_size
    attention = AttentionSpec(
        width=width, heads=model.num_attention_heads, bias=True, norm=QkNorm.ACROSS_HEADS
    )
    feed_forward = FeedForwardSpec(
        width=width, hidden=model.ffn_hidden_size, activation=Activation.GELU_TANH, bias=True
    )
    modulation, keys = Modulation("modulation", TableModulation()), (KeyRows(width),)
    if model.image_rows is not None:
        keys += (KeyRows(width, IMAGE, each=model.image_rows),)
    latents = Port(TOKENS, "self_attention", modulation[0])
    among = Attend(latents, attention)
    if model.sparse_attention:
        among = AttendCubes(latents, attention, share=model.sparse_share)
    text = Port(TOKENS, "cross_attention", norm=RowNorm("norm_cross", NormKind.LAYER))
    steps = (
        among,
        AttendTo(text, attention, keys),
        Feed(Port(TOKENS, "mlp", modulation[1]), feed_forward),
    )
    return StackSpec(name="blocks", count=model.num_layers, layer=LayerSpec(steps))


@dataclass(frozen=True)
class AttendCubes(Attend):
    """Video Sparse Attention of cubes of tokens (`dit.models.attention.cube_attention`)."""

    runs: ClassVar[str] = "dit.models.wan.model:AttendingCubes"
    share: float = 1.0
    """Fraction of a sample's cubes to which each cube attends in full."""

    @property
    def pairs(self) -> float:
        """The fraction of a sample's (query, key) pairs that attend, if all cubes are full.

        Pairs of means of cubes count, too.
        """
        return self.share + CUBE_TOKENS**-2


def _spec(model: WanConfig) -> NetworkSpec:
    return NetworkSpec(
        stacks=(wan_stack(model),),
        text_tokens=model.text_pad_to,
        image_rows=model.image_rows or 0,
    )


FAMILY = Family(
    name="wan",
    config=WanConfig,
    network=imported("dit.models.wan.model:WanNetwork"),
    spec=_spec,
    parts={
        "self_attention": "attention",
        "cross_attention": "cross_attention",
        "norm_cross": "cross_attention",
        "mlp": "mlp",
        "modulation": "modulation",
        "modulate_out": "head",
        "proj_out": "head",
    },
    diffusers=imported("dit.models.wan.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # indices of frames, independent of the frame rate
    weights=WeightRules(
        # As in Wan's published code, where tables are normal with standard deviation
        # 1 / sqrt(width). With gates of zeros, the network is that without sparse attention.
        zero=("*proj_out.weight", "*image_embedder.positions", "*linear_gate.weight"),
        no_decay=("*.table", "*image_embedder.positions"),
    ),
    objective=ObjectiveConventions(
        settings={"name": "flow"},
        # From the published schedulers.
        of_size={
            **{size: {"flow_shift": 3.0} for size in MODEL_SIZES},
            "wan2.1_flf2v_14b": {"flow_shift": 16.0},
            "wan2.2_ti2v_5b": {"flow_shift": 5.0},
        },
    ),
    vae=lambda _: "wan",
    tiny=TINY,
)
