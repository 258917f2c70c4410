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
    """Whether the tokens of a reference latent have the clean level; FLUX Kontext's have the level
    of their sample."""
    null: NullInput = NullInput.ENCODED
    """What replaces a text or vector when the caption is dropped; inputs of other kinds stay."""
    rate: float | None = None
    """Latent frames a second, of a sound."""
    rounds: bool = False
    """Whether the number of frames of a sound is rounded to the nearest, instead of up."""
    pictures: int = 0
    """Number of given pictures from which a codec computes the input: 1, the first frame; 2, the
    first and last; 0: none."""
    encoder: str | None = None
    """Text encoder (`dit.codecs.text`) of the published weights; None for inputs without one."""
    refused_encoders: Mapping[str, str] = field(default_factory=dict)
    """Encoders whose output has the same width but another meaning, each with the setting with
    which a network of the family reads it."""

    def sound_frames(self, seconds: float) -> int:
        """Number of latent frames that are generated for a sound of `seconds`; needs `rate`."""
        assert self.rate is not None, f"{self.name} has no rate"
        frames = seconds * self.rate
        return max(1, round(frames)) if self.rounds else math.ceil(frames - 1e-6)


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
    """Field of networks whose samples may have references; a base class, before `ModelConfig`."""

    reference_latents: OfInputs[int] = bounded(0, most=64, least=0)
    """Largest number of reference pictures of a sample, whose tokens follow the sample's own."""


class _TakesReferences(Protocol):
    @property
    def in_channels(self) -> int: ...
    @property
    def reference_latents(self) -> int: ...


def reference_inputs(model: _TakesReferences, *, clean: bool) -> list[SampleInput]:
    """Inputs for the references of a sample, whose tokens have the clean level or the sample's."""
    kind, width = InputKind.REFERENCE, model.in_channels
    return [
        SampleInput(name=f"{REFERENCE}_{n}", kind=kind, width=width, required=False, clean=clean)
        for n in range(model.reference_latents)
    ]


def null_text_inputs(model: ModelConfig) -> tuple[SampleInput, ...]:
    """The input with the text that replaces a caption whose encoder also sees pictures.

    That text depends on the sample's pictures, so each sample has its own.
    """
    null: Any = {"kind": InputKind.NULL_TEXT, "required": False, "may_be_empty": True}
    return (SampleInput(name="null_text", width=model.crossattn_emb_size, **null),)


@dataclass(frozen=True, kw_only=True)
class HasGuidance:
    """Field of networks with an optional guidance embedding; a base class, before `ModelConfig`."""

    guidance_embed: bool = True
    """Whether the network gets a guidance scale, `objective.guidance`."""


GUIDANCE = 1.0
"""Guidance scale that the guidance embedding gets in training: prediction without guidance."""


def guidance_told(scale: float = GUIDANCE) -> Callable[[HasGuidance], float | None]:
    """A function for `Family.guidance`: `scale` for networks with a guidance embedding."""
    return lambda model: scale if model.guidance_embed else None


def grid_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` by index of frame (at any rate), row and column."""
    return resolve_name("dit.models.positions:GridPositions")()


def time_offset_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (time, row, column, index in the text).

    Each reference has a time of its own.
    """
    return resolve_name("dit.models.positions:TimeOffsetPositions")()


def half_step_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (frame, row / 2, column / 2, index).

    The index is that in the text, 0 for the target, and negative for references.
    """
    return resolve_name("dit.models.positions:HalfStepPositions")()


def far_picture_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (index, row, column), with pictures after all texts."""
    return resolve_name("dit.models.positions:FarPicturePositions")()


def references_first_positions(_: ModelConfig) -> PositionRule:
    """The rule for `Family.positions` (index, row, column, picture), references first."""
    return resolve_name("dit.models.positions:ReferencesFirstPositions")()


class ConditionPositions(Protocol):
    """Positions of the tokens of a picture or clip that is given in a video, from some frame on."""

    def __call__(self, grid: Grid, *, frame: int, fps: float) -> Tensor:
        """Positions [tokens, axes] float32, for a picture or clip of `grid` patches.

        It begins at the pixel frame `frame`; `fps` is NaN if unknown.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionRules:
    """Rules for pictures and clips that generation is given at any frame of a video."""

    positions: ConditionPositions
    temporal_stride: int
    """Number of pixel frames per latent frame."""
    prefix_frames: int
    """Number of latent frames of a given clip that become additional tokens, if it does not begin
    the video."""

    def whole_frames(self, frames: int) -> int:
        """Number of pixel frames, stride * n + 1, of the longest clip with whole latent frames.

        The clip has at most `frames` pixel frames.
        """
        return (frames - 1) // self.temporal_stride * self.temporal_stride + 1


class KeptNorm(StrEnum):
    """The numbers whose norm guidance keeps equal to that of the conditional prediction."""

    TOKEN = "token"  # all numbers of a token (Qwen-Image)
    TOKEN_AT_MOST = "token at most"  # the same where guidance makes it larger (LongCat-Image)
    PICTURE_ROW = "picture row"  # a row of cells of one channel (Lumina Image 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConventions:
    """What an objective needs to know about a family's networks."""

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
    """Whether guidance has a second scale, for references: the prediction is also moved away from
    that without references."""
    keeps_norm: Callable[[Any], KeptNorm | None] = lambda _: None
    """Maps a configuration to the norm that guidance keeps; None: it keeps none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """Patterns of weight names, as in `fnmatch`, for initialisation, weight decay and training."""

    zero: tuple[str, ...] = ()
    """Matrices that start at zero, as all biases do."""
    no_decay: tuple[str, ...] = ()
    """Embeddings and tables that get no weight decay; biases and norms get none in any family."""
    fixed: tuple[str, ...] = ()
    """Tables that checkpoints hold and that are never trained: buffers, filled by their module."""
    sound: tuple[str, ...] = ()
    """Weights that compute the tokens of the sound, in networks that have some."""
    hears: tuple[str, ...] = ()
    """Weights by which frames attend to the sound, which a sample without one does not pass."""

    def starts_at_zero(self, name: str) -> bool:
        """Whether the matrix with this name in checkpoints starts at zero."""
        return any(fnmatchcase(name, pattern) for pattern in self.zero)

    def stream(self, name: str) -> LoraStreams:
        """The stream whose tokens alone pass a weight; both, where frames attend to the sound."""
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
    """Imports and returns the network's class, which is called with (configuration, process groups,
    virtual stage)."""
    spec: Callable[[Any], NetworkSpec]
    """Maps a configuration to the layers of its network."""
    parts: Mapping[str, str]
    """For words in names of weights, the part of the model by which their gradient norm is
    logged."""
    diffusers: Callable[[], DiffusersForm] | None = None
    """Imports the names and formats of Diffusers' counterpart; None: there is none, and nothing
    converts."""
    names: Callable[[], NameTable] | None = None
    """Imports the names of weights in files, where Diffusers has no counterpart to take them from;
    None: there are none, so that the network takes no adapters, no Muon and no groups."""
    inputs: Callable[[Any], tuple[SampleInput, ...]]
    """Maps a configuration to the inputs of a sample besides its latent."""
    positions: Callable[[Any], PositionRule]
    """Maps a configuration to the rule for positions of tokens."""
    weights: WeightRules
    objective: ObjectiveConventions
    conditions: Callable[[Any], ConditionRules | None] = lambda _: None
    """Maps a configuration to rules for pictures that generation gets at any frame; None:
    unsupported."""
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
    """Names of sizes whose published weights need few steps, which no pipeline class says."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """For published networks that the family does not have, the feature that it lacks for them."""
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each kind of network, under the name of a size, keys of `model` for a float32 network
    that trains in seconds on a CPU. It has at least four layers, and heads and widths that divide
    by four, so that it runs on layouts of up to four ranks."""

    def default(self) -> ModelConfig:
        """The family's default configuration."""
        return self.config()  # type: ignore[call-arg]

    def unguided_by_references(self, model: ModelConfig) -> str:
        """Why a guidance scale for references has no effect on the network of `model`.

        Empty if it has an effect.
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
