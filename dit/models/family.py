"""The description of a model family: everything that other code may ask about a network.

A family is one folder in `dit/models/` with one line in the registry (`dit.models.registry`). Code
outside that folder neither imports it nor names its classes nor compares `model.family` with a
text: it asks the `Family` of a configuration. This module imports neither torch nor Megatron-Core;
functions import what needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from dit.config import LoraStreams, ModelConfig, Precision
from dit.config.checks import bounded
from dit.config.resume import OfInputs

if TYPE_CHECKING:
    from torch import Tensor

    from dit.batch import Grid
    from dit.models.diffusers.form import DiffusersForm
    from dit.models.diffusers.names import NameTable
    from dit.models.layer_spec import NetworkSpec
    from dit.models.positions import PositionRule


POOLED, REFERENCE = "pooled_text", "reference_latent"
"""Name of pooled text in a shard, and prefix of the names of reference latents in a shard."""
TINY_NETWORK: Mapping[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "in_channels": 4,
    "precision": Precision.FP32,
}
"""Keys of `model` for a tiny network, with which most families begin `Family.tiny`."""


class InputKind(StrEnum):
    """Kind of an input that a sample has besides its latent."""

    TEXT = "text"  # rows of a text or image encoder, [L, width]
    # Rows in the place of the main text where the caption is dropped, [M, width]: of an encoder
    # that sees the sample's pictures, too, so that they are another sample's no more
    NULL_TEXT = "null_text"
    VECTOR = "vector"  # one vector, such as pooled text, [width]
    CHANNELS = "channels"  # channels beside those of the noisy latent, [width, F, H, W]
    # Of the first frames alone, beside the noisy ones, then a mask of these frames, [C, f, H, W]
    FRAME_CHANNELS = "frame_channels"
    FRAMES = "frames"  # clean latent frames in the place of the target's first ones, [C, f, H, W]
    REFERENCE = "reference"  # a reference latent: tokens of its own without noise, [C, F, H, W]
    # The latent of its sound, which a sample may lack, [width, A]: a stream of tokens of its own
    SOUND = "sound"
    # The second sample of a pair of preferences, of the latent's shape. Of no family: the objective
    # asks for it
    REJECTED = "rejected"


class NullInput(StrEnum):
    """What replaces an input when the caption is dropped (classifier-free guidance)."""

    ENCODED = "encoded"  # the encoder's of an empty caption
    EMPTY = "empty"  # no rows
    KEPT = "kept"  # the sample's own


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInput:
    """One tensor of a sample besides its latent."""

    name: str
    """The tensor's name in a shard."""
    kind: InputKind
    width: int
    """Width of a row or vector, or number of channels."""
    required: bool = True
    """Whether a sample without this tensor is refused."""
    may_be_empty: bool = False
    """Whether the tensor may have 0 rows."""
    rows: int | None = None
    """Number of rows that the tensor must have, as image encoders output; None: any number."""
    most_rows: int | None = None
    """Largest number of rows that Diffusers' network accepts; None: any number."""
    vocabulary: int | None = None
    """Number of token ids, if rows are token ids (`dit.token_ids`); None: rows are an encoder's
    output."""
    clean: bool = True
    """Whether the tokens of a reference latent have the noise level of clean tokens; FLUX Kontext's
    have the level of their sample."""
    null: NullInput = NullInput.ENCODED
    """What replaces a text or vector when the caption is dropped; inputs of other kinds stay."""
    rate: float | None = None
    """Latent frames per second of a sound; None for other inputs."""
    rounds_to_nearest: bool = False
    """Whether the number of frames of a sound is rounded to the nearest, instead of up."""
    pictures: int = 0
    """Number of conditioning pictures from which a codec computes the input: 1, the first frame; 2,
    the first and the last frame; 0: the input is not computed from pictures."""
    encoder: str | None = None
    """Text encoder (`dit.codecs.text`) of the published weights; None for inputs without one."""
    refused_encoders: Mapping[str, str] = field(default_factory=dict)
    """Maps encoders that are refused, although their output has the same width, to the setting with
    which a network of the family reads their output, such as `model.text_conditioner=stored`."""

    def sound_frames(self, seconds: float) -> int:
        """Number of latent frames that are generated for a sound of `seconds`; needs `rate`."""
        assert self.rate is not None, f"{self.name} has no rate"
        frames = seconds * self.rate
        return max(1, round(frames)) if self.rounds_to_nearest else math.ceil(frames - 1e-6)


def text_input(
    model: ModelConfig, *, encoder: str, may_be_empty: bool = False, most_rows: int | None = None
) -> SampleInput:
    """The input `text`: the caption's rows from the main text encoder, `encoder`."""
    return SampleInput(
        name="text",
        kind=InputKind.TEXT,
        width=model.crossattn_emb_size,
        may_be_empty=may_be_empty,
        most_rows=most_rows,
        encoder=encoder,
    )


class _ReadsPooledText(Protocol):
    @property
    def pooled_size(self) -> int: ...


def pooled_input(model: _ReadsPooledText, *, encoder: str) -> SampleInput:
    """The input with the caption's pooled vector from a second text encoder, `encoder`."""
    width = model.pooled_size
    return SampleInput(name=POOLED, kind=InputKind.VECTOR, width=width, encoder=encoder)


@dataclass(frozen=True, kw_only=True)
class HasReferences:
    """Field of networks whose samples may have references.

    It is a base class, which stands before `ModelConfig`.
    """

    reference_latents: OfInputs[int] = bounded(0, most=64, least=0)
    """Largest number of reference pictures of a sample; their tokens follow those of the target."""


class _TakesReferences(Protocol):
    @property
    def in_channels(self) -> int: ...
    @property
    def reference_latents(self) -> int: ...


def reference_inputs(model: _TakesReferences, *, clean: bool) -> list[SampleInput]:
    """Inputs for the reference latents of a sample.

    `clean` says whether their tokens have the noise level of clean tokens, or else the sample's.
    """
    kind, width = InputKind.REFERENCE, model.in_channels
    return [
        SampleInput(name=f"{REFERENCE}_{n}", kind=kind, width=width, required=False, clean=clean)
        for n in range(model.reference_latents)
    ]


def null_text_inputs(model: ModelConfig) -> tuple[SampleInput, ...]:
    """The input `null_text`: rows in place of a dropped caption, for encoders that see pictures.

    These rows depend on the sample's pictures, so each sample stores its own.
    """
    null: Any = {"kind": InputKind.NULL_TEXT, "required": False, "may_be_empty": True}
    return (SampleInput(name="null_text", width=model.crossattn_emb_size, **null),)


@dataclass(frozen=True, kw_only=True)
class HasGuidance:
    """Field of networks with an optional guidance embedding.

    It is a base class, which stands before `ModelConfig`.
    """

    guidance_embed: bool = True
    """Whether the network gets a guidance scale, `objective.guidance`."""


GUIDANCE = 1.0
"""Guidance scale that the guidance embedding gets in training; 1 stands for no guidance."""


def guidance_told(scale: float = GUIDANCE) -> Callable[[HasGuidance], float | None]:
    """A function for `Family.guidance` that returns `scale` for networks with a guidance embedding.

    For others it returns None.
    """
    return lambda model: scale if model.guidance_embed else None


def grid_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` that numbers frames, rows and columns, at any frame rate."""
    return resolve_name("dit.models.positions:GridPositions")()


def time_offset_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (time, row, column, index in the text).

    The target and each reference have different times.
    """
    return resolve_name("dit.models.positions:TimeOffsetPositions")()


def half_step_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (frame, row / 2, column / 2, index).

    The index is that in the text, 0 for the target, and negative for references.
    """
    return resolve_name("dit.models.positions:HalfStepPositions")()


def far_picture_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (index, row, column) that puts pictures after any text."""
    return resolve_name("dit.models.positions:FarPicturePositions")()


def references_first_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (index, row, column, picture) that puts references first."""
    return resolve_name("dit.models.positions:ReferencesFirstPositions")()


class ConditionPositions(Protocol):
    """Positions of the tokens of a conditioning picture or clip, by the frame where it begins."""

    def __call__(self, grid: Grid, *, frame: int, fps: float) -> Tensor:
        """Positions [tokens, axes] float32 of a conditioning picture or clip of `grid` patches.

        `frame` is the pixel frame of the video at which the condition begins; `fps` is NaN if
        unknown.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionRules:
    """Rules for pictures and clips that condition generation, from any frame of the video on."""

    positions: ConditionPositions
    temporal_stride: int
    """Number of pixel frames per latent frame."""
    prefix_frames: int
    """Number of latent frames that become additional tokens, of a conditioning clip that begins
    after the video's first frame."""

    def whole_frames(self, frames: int) -> int:
        """The largest number of pixel frames temporal_stride * n + 1 that is at most `frames`.

        A clip of that length has a whole number of latent frames.
        """
        return (frames - 1) // self.temporal_stride * self.temporal_stride + 1


class KeptNorm(StrEnum):
    """The numbers whose norm guidance keeps equal to their norm in the conditional prediction."""

    TOKEN = "token"  # all numbers of a token (Qwen-Image)
    TOKEN_AT_MOST = "token at most"  # the same where guidance makes it larger (LongCat-Image)
    PICTURE_ROW = "picture row"  # a row of cells of one channel (Lumina Image 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConventions:
    """Conventions of a family's networks that objectives, samplers and guidance depend on."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that the family sets; explicit keys override them."""
    of_size: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of `objective` that override `settings` for a named size, such as an expert's
    `level_range`."""
    sign: int = 1
    """1: the network's velocity is noise - data; -1: data - noise (Lumina 2)."""
    tells_data_part: bool = False
    """Whether the network gets 1 - t as timestep instead of t (Lumina 2, OmniGen2).
    `StackedTransformer` converts by `sign` and this field, so that other code sees t and noise -
    data."""
    clean_level: float | None = 0.0
    """Noise level t of clean tokens, such as a given first frame; None: there are no such
    tokens."""
    guides_by_references: bool = False
    """Whether guidance has a second scale, for references, which moves the prediction away from the
    prediction without references."""
    keeps_norm: Callable[[Any], KeptNorm | None] = lambda _: None
    """Maps a configuration to the numbers whose norm guidance keeps; None: it keeps none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """Patterns (`fnmatch`) of weight names, for initialisation, weight decay and training."""

    zero: tuple[str, ...] = ()
    """Matrices that start at zero, as all biases do."""
    no_decay: tuple[str, ...] = ()
    """Embeddings and tables that get no weight decay; biases and norms get none in any family."""
    fixed: tuple[str, ...] = ()
    """Tables that checkpoints hold and that are never trained: buffers, filled by their module."""
    sound: tuple[str, ...] = ()
    """Weights that only sound tokens pass, in networks with sound."""
    hears: tuple[str, ...] = ()
    """Weights of the attention from video tokens to sound, which samples without sound do not
    use."""

    def starts_at_zero(self, name: str) -> bool:
        """Whether the matrix with this name in checkpoints starts at zero."""
        return any(fnmatchcase(name, pattern) for pattern in self.zero)

    def stream(self, name: str) -> LoraStreams:
        """The stream (video, sound or both) whose tokens pass the weight `name`.

        It is both for weights of the attention from video tokens to sound (`hears`).
        """
        if any(fnmatchcase(name, pattern) for pattern in self.hears):
            return LoraStreams.BOTH
        sound = any(fnmatchcase(name, pattern) for pattern in self.sound)
        return LoraStreams.SOUND if sound else LoraStreams.VIDEO


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The description of a model family: data, and small functions of a configuration."""

    name: str
    """Value of `model.family`."""
    config: type[ModelConfig]
    """Class of the configuration `model`: its fields, their rules and named sizes."""
    network: Callable[[], Callable[..., Any]]
    """Imports and returns the network's class. It is called with (configuration, process groups,
    virtual stage)."""
    spec: Callable[[Any], NetworkSpec]
    """Maps a configuration to the layers of its network."""
    parts: Mapping[str, str]
    """Maps words in names of weights to the part of the model whose gradient norm includes them
    (`grad_norm_*`)."""
    diffusers: Callable[[], DiffusersForm] | None = None
    """Imports and returns the names and formats of Diffusers' counterpart; None: Diffusers has
    none, and weights cannot be converted."""
    names: Callable[[], NameTable] | None = None
    """Imports and returns the table of weight names in files, for families without a counterpart in
    Diffusers. If this and `diffusers` are None, the network supports no adapters, no Muon and no
    parameter groups."""
    inputs: Callable[[Any], tuple[SampleInput, ...]]
    """Maps a configuration to the inputs of a sample besides its latent."""
    positions: Callable[[Any], PositionRule]
    """Maps a configuration to the rule for positions of tokens."""
    weights: WeightRules
    objective: ObjectiveConventions
    conditions: Callable[[Any], ConditionRules | None] = lambda _: None
    """Maps a configuration to the rules for conditioning pictures and clips at any frame; None:
    they are not supported."""
    guidance: Callable[[Any], float | None] = lambda _: None
    """Maps a configuration to the usual `objective.guidance`; None: no guidance embedding."""
    tells_step_end: Callable[[Any], bool] = lambda _: False
    """Whether the network of a configuration also gets the timestep at which a step ends (mean
    flow, flow maps)."""
    trains_step_end: bool = False
    """Whether training passes the sample's own timestep as the end of a step. If not, networks with
    such an input can generate but not be trained."""
    vae: Callable[[Any], str]
    """Maps a configuration to the codec (`dit.codecs.vae`) of the published weights' latents."""
    distilled: Collection[str] = ()
    """Names of sizes whose published weights are distilled to few steps, which no pipeline class of
    Diffusers shows."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Maps named sizes of published networks that the family does not support to the feature that
    they need."""
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Maps a named size, one for each kind of network of the family, to keys of `model` for a
    float32 network that trains in seconds on a CPU. The network has at least four layers, and heads
    and widths that divide by four, so that it runs on layouts of up to four ranks."""

    def default(self) -> ModelConfig:
        """The family's default configuration."""
        return self.config()  # type: ignore[call-arg]

    def unguided_by_references(self, model: ModelConfig) -> str:
        """A message why a guidance scale for references has no effect on the network of `model`.

        It is "" if the scale has an effect.
        """
        if not self.objective.guides_by_references:
            return f"model.family={self.name} has no guidance for references"
        if any(one.kind is InputKind.REFERENCE for one in self.inputs(model)):
            return ""
        return f"model.family={self.name} is given no references (model.reference_latents=0)"

    @property
    def sizes(self) -> Mapping[str, Mapping[str, Any]]:
        """The fields of `model` that each named size sets."""
        return self.config.sizes

    @property
    def keys_of_sizes(self) -> dict[str, dict[str, Any]]:
        """Settings of each named size, by keys such as `model.num_layers` and `objective.name`."""
        return {
            size: {f"model.{key}": value for key, value in values.items()}
            | {f"objective.{k}": v for k, v in self.objective.of_size.get(size, {}).items()}
            for size, values in self.sizes.items()
        }
