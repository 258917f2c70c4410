"""The description of a model family: everything that other code may ask about a network.

A family is one folder in `dit/models/` with one line in the registry (`dit.models.registry`). Code
outside that folder neither imports it nor names its classes nor compares `model.family` with a
text: it asks the `Family` of a configuration. This module imports neither torch nor Megatron-Core;
functions below import what needs them.
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
"""Name of pooled text in a shard, and prefix of the names of reference latents."""
TINY_NETWORK: Mapping[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "in_channels": 4,
    "precision": Precision.FP32,
}
"""Keys of `model` that `Family.tiny` sets for most networks."""


class InputKind(StrEnum):
    """The kinds of a sample's inputs besides the latent."""

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
    """Replacement of an input when the caption is dropped (classifier-free guidance)."""

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
    """Width of a row, or number of channels."""
    required: bool = True
    """Whether a sample without it is refused; a sample may lack other inputs."""
    may_be_empty: bool = False
    """Whether 0 rows are allowed."""
    rows: int | None = None
    """Number of rows that each sample must have, as image encoders output; None: any number."""
    most_rows: int | None = None
    """Largest number of rows of Diffusers' network; None: any number."""
    vocabulary: int | None = None
    """Rows are token ids below this (`dit.token_ids`); None: rows of an encoder's output."""
    clean: bool = True
    """Whether a reference latent has the clean level; FLUX Kontext's has the sample's."""
    null: NullInput = NullInput.ENCODED
    """Value of texts and vectors for a dropped caption; inputs of other kinds stay."""
    rate: float | None = None
    """Latent frames a second, of a sound."""
    rounds: bool = False
    """Whether the number of frames of a sound is rounded to the nearest, instead of up."""
    pictures: int = 0
    """Number of given pictures from which the codec computes it: 1, the first frame; 2, also the
    last."""
    encoder: str | None = None
    """Text encoder (`dit.codecs.text`) of the published weights; None for inputs without one."""
    refused_encoders: Mapping[str, str] = field(default_factory=dict)
    """Encoder of the same width but another meaning -> the setting with which a network of the
    family reads its output."""

    def sound_frames(self, seconds: float) -> int:
        """Number of latent frames that are generated for a sound of `seconds`; needs `rate`."""
        assert self.rate is not None, f"{self.name} has no rate"
        frames = seconds * self.rate
        return max(1, round(frames)) if self.rounds else math.ceil(frames - 1e-6)


def text_input(
    model: ModelConfig, *, encoder: str, may_be_empty: bool = False, most_rows: int | None = None
) -> SampleInput:
    """The input with the caption's embedding from the main text encoder."""
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
    """The input with the pooled caption embedding of a second text encoder."""
    width = model.pooled_size
    return SampleInput(name=POOLED, kind=InputKind.VECTOR, width=width, encoder=encoder)


@dataclass(frozen=True, kw_only=True)
class HasReferences:
    """The field of networks whose samples may have references; a base before `ModelConfig`."""

    reference_latents: OfInputs[int] = bounded(0, most=64, least=0)
    """Reference pictures that a sample may have, as tokens beside its own."""


class _TakesReferences(Protocol):
    @property
    def in_channels(self) -> int: ...
    @property
    def reference_latents(self) -> int: ...


def reference_inputs(model: _TakesReferences, *, clean: bool) -> list[SampleInput]:
    """Inputs for the references of a sample, with the clean timestep or the sample's own."""
    kind, width = InputKind.REFERENCE, model.in_channels
    return [
        SampleInput(name=f"{REFERENCE}_{n}", kind=kind, width=width, required=False, clean=clean)
        for n in range(model.reference_latents)
    ]


def null_text_inputs(model: ModelConfig) -> tuple[SampleInput, ...]:
    """The input with the null text of a sample's pictures, if the encoder of `model` sees them."""
    null: Any = {"kind": InputKind.NULL_TEXT, "required": False, "may_be_empty": True}
    return (SampleInput(name="null_text", width=model.crossattn_emb_size, **null),)


@dataclass(frozen=True, kw_only=True)
class HasGuidance:
    """The field of networks with an optional guidance embedding; a base before `ModelConfig`."""

    guidance_embed: bool = True
    """Whether the network gets a guidance scale, `objective.guidance`."""


GUIDANCE = 1.0
"""Guidance scale of the guidance embedding in training: prediction without guidance."""


def guidance_told(scale: float = GUIDANCE) -> Callable[[HasGuidance], float | None]:
    """`Family.guidance` of networks with a guidance embedding, with `scale` in training."""
    return lambda model: scale if model.guidance_embed else None


def grid_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` by indices of frames (at any rate), rows and columns."""
    return resolve_name("dit.models.positions:GridPositions")()


def time_offset_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` (time, row, column, place in the text); references have other times."""
    return resolve_name("dit.models.positions:TimeOffsetPositions")()


def half_step_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` (frame, row / 2, column / 2, place); references have negative places."""
    return resolve_name("dit.models.positions:HalfStepPositions")()


def far_picture_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` (place, row, column); pictures come after all places of texts."""
    return resolve_name("dit.models.positions:FarPicturePositions")()


def references_first_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` (place, row, column, number of the picture); references come first."""
    return resolve_name("dit.models.positions:ReferencesFirstPositions")()


class ConditionPositions(Protocol):
    """Positions of the tokens of a picture or clip that is given from a frame of a video on."""

    def __call__(self, grid: Grid, *, frame: int, fps: float) -> Tensor:
        """Positions [tokens, axes] float32; `frame` is a pixel frame, `fps` NaN if unknown."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionRules:
    """Rules for pictures and clips that are given at any frame of a video in generation."""

    positions: ConditionPositions
    temporal_stride: int
    """Pixel frames of a latent frame."""
    prefix_frames: int
    """Latent frames of a clip, given at a later frame, that become additional tokens."""

    def whole_frames(self, frames: int) -> int:
        """Pixel frames of the longest clip with whole latent frames: stride * n + 1."""
        return (frames - 1) // self.temporal_stride * self.temporal_stride + 1


class KeptNorm(StrEnum):
    """The part of a prediction whose norm, after guidance, is reset to the conditional one's."""

    TOKEN = "token"  # all numbers of a token (Qwen-Image)
    TOKEN_AT_MOST = "token at most"  # the same where guidance makes it larger (LongCat-Image)
    PICTURE_ROW = "picture row"  # a row of cells of one channel (Lumina Image 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConventions:
    """Facts about a family's networks that an objective needs."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that the family sets; explicit keys override them."""
    of_size: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a size -> keys of `objective` that override `settings`, such as an expert's
    `level_range`."""
    sign: int = 1
    """1: the velocity is noise - data; -1: data - noise (Lumina 2)."""
    tells_data_part: bool = False
    """Whether the network gets 1 - t as timestep instead of t (Lumina 2, OmniGen2).

    `StackedTransformer` converts `sign` and this one, so that other code sees t and noise - data.
    """
    clean_level: float | None = 0.0
    """Noise level t of clean tokens, such as a given first frame; None: there are no such
    tokens."""
    guides_by_references: bool = False
    """Whether guidance also has a separate scale for references, away from samples without them."""
    keeps_norm: Callable[[Any], KeptNorm | None] = lambda _: None
    """Configuration -> what guidance does to the norm of its prediction; None: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """Patterns of weight names, as in `fnmatch`, for initialisation and decay."""

    zero: tuple[str, ...] = ()
    """Matrices that start at zero, as all biases do."""
    no_decay: tuple[str, ...] = ()
    """Embeddings and tables without weight decay, beside biases and norms."""
    fixed: tuple[str, ...] = ()
    """Tables that checkpoints hold and that are never trained: buffers, filled by their module."""
    sound: tuple[str, ...] = ()
    """Weights that compute the tokens of the sound, in networks that have some."""
    hears: tuple[str, ...] = ()
    """Weights by which frames attend to the sound, which a sample without one does not pass."""

    def starts_at_zero(self, name: str) -> bool:
        """Whether a matrix starts at zero, by its key in a checkpoint."""
        return any(fnmatchcase(name, pattern) for pattern in self.zero)

    def stream(self, name: str) -> LoraStreams:
        """The stream whose tokens alone pass a weight; both, where frames attend to the sound."""
        if any(fnmatchcase(name, pattern) for pattern in self.hears):
            return LoraStreams.BOTH
        sound = any(fnmatchcase(name, pattern) for pattern in self.sound)
        return LoraStreams.SOUND if sound else LoraStreams.VIDEO


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The description of a model family: data, and small pure functions of its configuration."""

    name: str
    """Value of `model.family`."""
    config: type[ModelConfig]
    """Class of the configuration: its fields, their rules and named sizes."""
    network: Callable[[], Callable[..., Any]]
    """Imports the network's class, which is called with (configuration, process groups, virtual
    stage)."""
    spec: Callable[[Any], NetworkSpec]
    """Configuration -> the layers of its network."""
    parts: Mapping[str, str]
    """A word in weight names -> part of the model whose gradient norm is logged."""
    diffusers: Callable[[], DiffusersForm] | None = None
    """Imports the names and formats of Diffusers' counterpart; None: there is none, and nothing
    converts."""
    names: Callable[[], NameTable] | None = None
    """Imports the names of weights in files, where Diffusers has no counterpart to take them from;
    None: there are none, so that the network takes no adapters, no Muon and no groups."""
    inputs: Callable[[Any], tuple[SampleInput, ...]]
    """Configuration -> the inputs of a sample beside its latent."""
    positions: Callable[[Any], PositionRule]
    """Configuration -> the rule for positions of tokens."""
    weights: WeightRules
    objective: ObjectiveConventions
    conditions: Callable[[Any], ConditionRules | None] = lambda _: None
    """Configuration -> rules for pictures given at any frame in generation; None: not supported."""
    guidance: Callable[[Any], float | None] = lambda _: None
    """Configuration -> usual `objective.guidance`; None: no guidance embedding."""
    tells_step_end: Callable[[Any], bool] = lambda _: False
    """Configuration -> whether the network also gets the end of a step (mean flow, flow maps)."""
    trains_step_end: bool = False
    """Whether training passes the sample's own level as that end; else such networks generate, and
    are not trained."""
    vae: Callable[[Any], str]
    """Configuration -> codec (`dit.codecs.vae`) of the published weights' latents."""
    distilled: Collection[str] = ()
    """Names of sizes whose published weights need few steps, if no pipeline says so."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Name of a published network -> the feature that it needs and the family lacks."""
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a size -> keys of `model` for a float32 network that trains in seconds on a CPU: one
    for each kind of network. It has at least four layers, and heads and widths that divide by
    four, so that it runs on layouts of up to four ranks."""

    def default(self) -> ModelConfig:
        """The family's default configuration."""
        return self.config()  # type: ignore[call-arg]

    def unguided_by_references(self, model: ModelConfig) -> str:
        """Reason why a scale of `objective.guides_by_references` has no effect.

        Empty if it has one.
        """
        if not self.objective.guides_by_references:
            return f"guidance of model.family={self.name} leads away from no references"
        if any(one.kind is InputKind.REFERENCE for one in self.inputs(model)):
            return ""
        return f"model.family={self.name} is given no references (model.reference_latents=0)"

    @property
    def sizes(self) -> Mapping[str, Mapping[str, Any]]:
        """The fields that each named size of the family sets."""
        return self.config.sizes

    @property
    def keys_of_sizes(self) -> dict[str, dict[str, Any]]:
        """Settings of each named size, by keys such as `model.num_layers` and `objective.name`."""
        return {
            size: {f"model.{key}": value for key, value in values.items()}
            | {f"objective.{k}": v for k, v in self.objective.of_size.get(size, {}).items()}
            for size, values in self.sizes.items()
        }
