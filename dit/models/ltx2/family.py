"""The family `ltx2`, LTX-2.0, 2.3 and 2.5: its fields, sizes, rules, inputs and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.config.resume import Live, OfInputs, Refused
from dit.models.family import (
    TINY_NETWORK,
    Family,
    HasReferences,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    reference_inputs,
    text_input,
)
from dit.models.layer_spec import (
    SOUND_TOKENS,
    TOKENS,
    Activation,
    Attend,
    AttendAcross,
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
    NormKind,
    Port,
    QkNorm,
    RowNorm,
    StackSpec,
)
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import CellMiddles

SOUND_RATE = 25.0
"""Latent frames per second of the published audio VAE."""
SOUND = "sound"
"""Name of the stream of sound in a pack."""
SOUND_TEXT = "sound_text"
"""Name of the caption states to which sound attends."""
FIRST_FRAME = "first_frame_latent"


class TextModulation(StrEnum):
    """How caption states, and the queries that attend to them, are scaled and shifted."""

    NONE = "none"  # not at all (2.0)
    TOLD = "told"  # by a table of each layer, plus vectors of the sample's timestep (2.3, 2.5)
    TABLE = "table"  # by the table only, so that keys and values do not depend on the timestep


class CrossLevels(StrEnum):
    """The timestep that modulates the attention between video and sound."""

    OTHER = "other"  # the sample's timestep of the other stream (Diffusers' pipelines)
    OWN = "own"  # the token's own timestep (`use_cross_timestep=False` of Diffusers' network)


class TextConnectors(StrEnum):
    """Whether shards hold the outputs or the inputs of the connectors."""

    STORED = "stored"  # shards hold the outputs of the connectors
    FROZEN = "frozen"  # shards hold the inputs; the network contains the connectors, untrained


MOST_CONNECTOR_LAYERS = 16
CONNECTOR_MLP_RATIO = 4
"""Hidden width of a connector's MLPs divided by the width of its tokens; fixed in Diffusers."""
_WIDE_TEXT = {"crossattn_emb_size": 4096, "sound_text_size": 2048, "text_projections": False}
_V23 = {**_WIDE_TEXT, "head_gates": True, "text_modulation": TextModulation.TOLD}
_V25 = {**_V23, "video_mlp_bias": False, "keyframe_embedding": True}
MODEL_SIZES: dict[str, dict[str, Any]] = {"ltx2.0": {}, "ltx2.3": _V23, "ltx2.5": _V25}
"""Fields of `model` by size name, according to the options of Diffusers' class."""
_TINY = {
    **TINY_NETWORK,
    "hidden_size": 40,
    "patch_spatial": 2,
    "sound_hidden_size": 24,
    "sound_channels": 3,
    "crossattn_emb_size": 16,
    "sound_text_size": 16,
    **{"connector_layers": 2, "connector_heads": 4},
    **{"connector_rows": 32, "connector_registers": 8},
}
_TINY_WIDE = {**_TINY, "hidden_size": 48, "crossattn_emb_size": 48, "sound_text_size": 24}
TINY: Mapping[str, Mapping[str, Any]] = {
    "ltx2.0": _TINY,
    "ltx2.3": {**_TINY_WIDE, "reference_latents": 1},
    "ltx2.5": _TINY_WIDE,
}
"""Keys of `model` for tiny networks (`Family.tiny`); in the first, two pairs of numbers are left
over and not rotated, in the others none."""


@dataclass(frozen=True, kw_only=True)
class Ltx2Config(HasReferences, ModelConfig):
    """Keys of `model`: sizes of both streams, options, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "ltx2.3"
    """A named size (ltx2.0, ltx2.3, ltx2.5) or `custom`."""
    family: str = "ltx2"
    num_layers: int = 48
    hidden_size: int = 4096
    num_attention_heads: int = 32
    """Number of heads of every attention, in both streams and between them."""
    in_channels: int = 128
    patch_spatial: int = 1
    crossattn_emb_size: int = 3840
    sound_channels: Refused[int] = bounded(128, most=2**16)
    """Number of channels of a sound's latent in the shards."""
    sound_rate: Refused[float] = bounded(SOUND_RATE, most=1e6, least=None)
    """Latent frames of sound per second (published audio VAE: 25)."""
    sound_hidden_size: Refused[int] = bounded(2048, most=2**17)
    """Width of the sound's tokens in the layers, and of the attention between the streams."""
    sound_text_size: Refused[int] = bounded(3840, most=2**20)
    """Width of the caption states for the sound in the shards."""
    text_projections: Refused[bool] = True
    """Whether two linears project the caption states for each stream (2.0); if not, their width
    must be that of the stream."""
    text_modulation: Refused[TextModulation] = TextModulation.NONE
    """Scales and shifts of caption states and of the queries that attend to them: none (2.0), told
    (a table plus vectors of the timestep; 2.3, 2.5), or table (only the table)."""
    head_gates: Refused[bool] = False
    """Whether each head of every attention has a gate (2.3, 2.5)."""
    video_mlp_bias: Refused[bool] = True
    """Whether the linears of the video's MLP have biases (2.0, 2.3)."""
    keyframe_embedding: Refused[bool] = False
    """Whether there is an embedding of keyframes (2.5); training and generation do not use it
    yet."""
    text_connectors: Refused[TextConnectors] = TextConnectors.STORED
    """Captions in the shards: stored (outputs of the connectors), or frozen (inputs of the
    connectors, which are part of the network and not trained)."""
    connector_layers: Refused[int | None] = bounded(None, most=MOST_CONNECTOR_LAYERS)
    """Number of layers of each of the two connectors; null: 8 with head_gates, else 2, as
    published."""
    connector_heads: Refused[int | None] = bounded(None, most=2**10)
    """Number of attention heads of a connector; null: 32 with head_gates, else 30, as published."""
    connector_rows: Refused[int] = bounded(1024, most=2**14)
    """Number of tokens to which a connector pads each caption."""
    connector_registers: Refused[int] = bounded(128, most=2**14)
    """Number of learned rows, which are repeated to pad captions."""
    cross_levels: Live[CrossLevels] = CrossLevels.OTHER
    """Timestep that modulates the attention between the streams: the sample's timestep of the other
    stream (other, as in Diffusers' pipelines), or the token's own (own)."""
    reference_latents: OfInputs[int] = 0
    """Largest number of reference videos of a sample (IC-LoRA), which become additional clean
    tokens with the positions of the target's tokens."""
    reference_scale: OfInputs[int] = bounded(1, most=64)
    """Rows and columns of the target per row and column of a reference: 2 for references of half
    the size (`reference_downscale_factor` in Diffusers)."""

    def own_sizes(self) -> list[Rule]:
        return [
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to} must be null: LTX-2 does not attend to padding of"
                " captions",
            ),
            (
                self.patch_temporal == 1,
                f"patch_temporal={self.patch_temporal} must be 1: a token of LTX-2 has one latent"
                " frame",
            ),
            (self.sound_rate > 0, f"sound_rate={self.sound_rate} must be positive"),
        ]

    def own_shapes(self) -> list[Rule]:
        heads = self.num_attention_heads
        connectors = self._connectors() if self.has_connectors else []
        texts = {
            "crossattn_emb_size": (self.crossattn_emb_size, self.hidden_size),
            "sound_text_size": (self.sound_text_size, self.sound_hidden_size),
        }
        return [
            *(
                (
                    size % (2 * heads) == 0,
                    f"{name}={size} must be a multiple of 2 * num_attention_heads = {2 * heads}:"
                    " rotary positions need heads of an even width",
                )
                for name, size in (
                    ("hidden_size", self.hidden_size),
                    ("sound_hidden_size", self.sound_hidden_size),
                )
            ),
            (
                self.hidden_size >= 6,
                f"hidden_size={self.hidden_size} must be at least 6, for rotary positions on three"
                " axes",
            ),
            *(
                (
                    self.text_projections or size == width,
                    f"{name}={size} must be {width}, the width of the stream, because"
                    " text_projections=false",
                )
                for name, (size, width) in texts.items()
            ),
            *connectors,
        ]

    def _connectors(self) -> list[Rule]:
        """Rules for the connectors, if the network contains them."""
        heads, rows = self.heads_of_connectors, self.connector_rows
        sizes = {"crossattn_emb_size": self.crossattn_emb_size}
        sizes["sound_text_size"] = self.sound_text_size
        return [
            *(
                (
                    size % (2 * heads) == 0,
                    f"{name}={size} must be a multiple of 2 * connector_heads = {2 * heads}",
                )
                for name, size in sizes.items()
            ),
            (
                heads % self.tensor_model_parallel_size == 0,
                f"connector_heads={heads} must be a multiple of tensor_model_parallel_size="
                f"{self.tensor_model_parallel_size}",
            ),
            (
                rows % self.connector_registers == 0,
                f"connector_rows={rows} must be a multiple of connector_registers="
                f"{self.connector_registers}",
            ),
        ]

    @property
    def has_connectors(self) -> bool:
        """Whether the network contains the connectors, on the first pipeline stage."""
        return self.text_connectors is TextConnectors.FROZEN

    @property
    def layers_of_connectors(self) -> int:
        """Number of layers of each connector."""
        return self.connector_layers or (8 if self.head_gates else 2)

    @property
    def heads_of_connectors(self) -> int:
        """Number of attention heads of each connector."""
        return self.connector_heads or (32 if self.head_gates else 30)

    @property
    def sound_ffn_size(self) -> int:
        """Hidden width of the sound's MLP."""
        return int(self.sound_hidden_size * self.mlp_ratio)

    @property
    def table_rows(self) -> int:
        """Number of scales, shifts and gates of a stream in a layer.

        Those of the attention between the streams are not counted.
        """
        return 6 if self.text_modulation is TextModulation.NONE else 9

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        return [*sizes, self.crossattn_emb_size, self.patch_features]


@dataclass(frozen=True)
class TableRows(FamilyModulation):
    """Modulation by a learned table plus vectors of the timestep that all layers share.

    Each slot uses some rows of the sum.
    """

    runs: ClassVar[str] = "dit.models.ltx2.layers:SlotTable"
    shared: str
    """Name of the shared vectors in `TimestepConditioning.of_rows`."""
    slots: tuple[tuple[int, int, int | None], ...]
    """For each slot, the indices of its rows: (shift, scale, gate or None without a gate)."""

    @property
    def rows(self) -> int:
        return 1 + max(row for slot in self.slots for row in slot if row is not None)


@dataclass(frozen=True)
class AttendToCaption(AttendTo):
    """Cross-attention to the caption states, which each layer may scale and shift."""

    runs: ClassVar[str] = "dit.models.ltx2.layers:CaptionAttending"
    table: Modulation | None = None
    """Scale and shift of the caption states; None: they are not modulated."""


def rows_of_table(stream: str) -> str:
    """Name of the shared vectors for all parts of `stream` but the attention between streams."""
    return f"{stream}_rows"


def rows_between(stream: str) -> str:
    """Name of the shared vectors for the attention between streams, in `stream`."""
    return f"{stream}_between"


def rows_of_text(stream: str) -> str:
    """Name of the shared vectors for the caption states to which `stream` attends."""
    return f"{stream}_text_rows"


def _attention(model: Ltx2Config, width: int) -> AttentionSpec:
    return AttentionSpec(
        width=width,
        heads=model.num_attention_heads,
        bias=True,
        norm=QkNorm.ACROSS_HEADS,
        eps=1e-6,
        head_gate=model.head_gates,
    )


def _own_parts(model: Ltx2Config, row: str) -> tuple[LayerPart, LayerPart, LayerPart]:
    """Self-attention, attention to the caption, and MLP of the stream of tokens `row`."""
    is_video = row == TOKENS
    prefix, caption = ("", "text") if is_video else ("sound_", SOUND_TEXT)
    width = model.hidden_size if is_video else model.sound_hidden_size
    vectors = tuple((first, first + 1, first + 2) for first in range(0, model.table_rows, 3))
    own = Modulation(f"{prefix}modulation", TableRows(rows_of_table(row), vectors))
    attention, keys = _attention(model, width), (KeyRows(width, caption),)
    feed_forward = FeedForwardSpec(
        width=width,
        hidden=int(width * model.mlp_ratio),
        activation=Activation.GELU_TANH,
        bias=model.video_mlp_bias or not is_video,
    )
    port = Port(row, f"{prefix}cross_attention", own[2])
    table = Modulation(f"{prefix}text_table", TableRows(rows_of_text(row), ((0, 1, None),)))
    if model.text_modulation is TextModulation.NONE:
        # A norm without scale, shift or gate.
        norm = RowNorm(f"{prefix}text_norm", NormKind.BARE)
        port, table = Port(row, port.module, norm=norm), None
    return (
        Attend(Port(row, f"{prefix}self_attention", own[0]), attention),
        AttendToCaption(port, attention, keys, table),
        Feed(Port(row, f"{prefix}mlp", own[1]), feed_forward),
    )


def _parts_between(model: Ltx2Config) -> tuple[LayerPart, LayerPart]:
    """Attention of video to sound and of sound to video; both read tokens from before this step."""
    width, sound = model.hidden_size, model.sound_hidden_size
    # Rows of Diffusers' tables: 0, 1 are scale and shift in the attention of the video to the
    # sound, 2, 3 in that of the sound to the video; 4 is the gate of the stream's own output.
    of_video, of_sound = ((1, 0, 4), (3, 2, None)), ((3, 2, 4), (1, 0, None))
    video = Modulation("between", TableRows(rows_between(TOKENS), of_video))
    heard = Modulation("sound_between", TableRows(rows_between(SOUND_TOKENS), of_sound))
    attention = _attention(model, sound)
    return (
        AttendAcross(
            Port(TOKENS, "sound_to_video", video[0]),
            Port(SOUND_TOKENS, slot=heard[1], writes=False),
            attention,
            (width, sound),
        ),
        AttendAcross(
            Port(SOUND_TOKENS, "video_to_sound", heard[0]),
            Port(TOKENS, slot=video[1], writes=False),
            attention,
            (sound, width),
        ),
    )


def ltx2_layer(model: Ltx2Config) -> LayerSpec:
    """The layer: each stream attends to itself, to its caption and to the other; then the MLPs."""
    parts = zip(_own_parts(model, TOKENS), _own_parts(model, SOUND_TOKENS), strict=True)
    attends, texts, feeds = parts
    return LayerSpec((*attends, *texts, _parts_between(model), *feeds))


def ltx2_stack(model: Ltx2Config) -> StackSpec:
    """The specification of LTX-2's layers."""
    return StackSpec(name="blocks", count=model.num_layers, layer=ltx2_layer(model))


def _encoder(model: Ltx2Config) -> str:
    """The name in `dit.codecs` of the VAE and of the text encoder of the published weights."""
    return "ltx2" if model.has_connectors else "ltx2_connected"


def _inputs(model: Ltx2Config) -> tuple[SampleInput, ...]:
    given: Any = {"width": model.in_channels, "required": False, "pictures": 1}
    most = model.connector_rows if model.has_connectors else None
    told: Any = {"width": model.sound_text_size, "most_rows": most}
    texts = [SampleInput(name=SOUND_TEXT, kind=InputKind.TEXT, **told)]
    if model.has_connectors and model.text_projections:
        texts = []  # both connectors of 2.0 have the same input
    heard = SampleInput(
        name=SOUND,
        kind=InputKind.SOUND,
        width=model.sound_channels,
        required=False,
        rate=model.sound_rate,
        rounds_to_nearest=True,
    )
    return (
        text_input(model, encoder=_encoder(model), most_rows=most),
        *texts,
        heard,
        SampleInput(name=FIRST_FRAME, kind=InputKind.FRAMES, **given),
        *reference_inputs(model, clean=True),
    )


def ltx2_positions(model: Ltx2Config) -> CellMiddles:
    """The rule that gives the tokens of `model` their positions, in seconds and pixels."""
    from dit.models.positions import CellMiddles

    return CellMiddles(model.patch_spatial, reference_scale=model.reference_scale)


FAMILY = Family(
    name="ltx2",
    config=Ltx2Config,
    network=imported("dit.models.ltx2.model:Ltx2Network"),
    spec=lambda model: NetworkSpec(stacks=(ltx2_stack(model),)),
    parts={
        "sound_to_video": "between streams",
        "video_to_sound": "between streams",
        "between": "modulation",
        "self_attention": "attention",
        "cross_attention": "cross_attention",
        "mlp": "mlp",
        "modulation": "modulation",
        "modulate_out": "head",
        "proj_out": "head",
    },
    diffusers=imported("dit.models.ltx2.diffusers:FORM"),
    inputs=_inputs,
    positions=ltx2_positions,
    weights=WeightRules(
        zero=("*proj_out.weight", "keyframes"),
        no_decay=("*.table", "keyframes"),
        fixed=("*_in.connector.*",),
        sound=("sound_*", "blocks.layers.sound_*", "blocks.layers.video_to_sound.*"),
        hears=(
            *("blocks.layers.sound_to_video.*", "blocks.layers.between.*"),
            *("video_in.between.*", "video_in.gates.*"),
        ),
    ),
    objective=ObjectiveConventions(
        settings={
            "name": "flow",
            "sampling_levels": "even",
            "shift_terminal": 0.1,
            "time_shift_type": "exponential",
            "base_shift": 0.95,
            "max_shift": 2.05,
            "base_image_seq_len": 1024,
            "max_image_seq_len": 4096,
        }
    ),
    vae=_encoder,
    tiny=TINY,
)
