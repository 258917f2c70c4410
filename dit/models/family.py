"""The description of a model family: everything that other code may ask about a network.

A family is one folder in `dit/models/` with one line in the registry (`dit.models.registry`). Code
outside that folder neither imports its modules nor compares `model.family` with a name: it asks the
`Family` of a configuration. This module imports neither torch nor Megatron-Core; some functions
import modules that need them.
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
"""Name of the pooled text in a shard, and prefix of the names of reference latents in a shard."""
TINY_NETWORK: Mapping[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "in_channels": 4,
    "precision": Precision.FP32,
}
"""Keys of `model` for a tiny network that most families have in common (`Family.tiny`)."""


class InputKind(StrEnum):
    """What a tensor of a sample besides its latent is, and thus how the network uses it."""

    TEXT = "text"  # rows of a text or image encoder, [L, width]
    # Rows that replace the main text if the caption is dropped, [M, width]. Each sample has its
    # own, because the encoder also sees the sample's pictures.
    NULL_TEXT = "null_text"
    VECTOR = "vector"  # one vector, such as pooled text, [width]
    CHANNELS = "channels"  # additional channels of the noisy latent, [width, F, H, W]
    # Clean first frames [C, f, H, W]; they and a mask of given frames become additional channels
    FRAME_CHANNELS = "frame_channels"
    FRAMES = "frames"  # clean first frames, which replace those of the noisy latent, [C, f, H, W]
    REFERENCE = "reference"  # a reference latent: additional tokens without noise, [C, F, H, W]
    # Latent of the sample's sound, [width, A], which a sample may lack: a separate stream of tokens
    SOUND = "sound"
    # The rejected sample of a preference pair, of the latent's shape; an input of the objective,
    # not of a network
    REJECTED = "rejected"


class NullInput(StrEnum):
    """What replaces an input when the caption is dropped (classifier-free guidance)."""

    ENCODED = "encoded"  # the encoder's output for an empty caption
    EMPTY = "empty"  # no rows
    KEPT = "kept"  # nothing: the sample's own input stays


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
    """Number of rows that the tensor must have (image encoders output a fixed number); None: any
    number."""
    most_rows: int | None = None
    """Largest number of rows that Diffusers' network accepts; None: any number."""
    vocabulary: int | None = None
    """Number of possible token ids, if rows are token ids (`dit.token_ids`); None: rows are the
    output of an encoder."""
    clean: bool = True
    """Whether the tokens of a reference latent get `clean_level` as timestep; if False, they get
    the timestep of their sample (FLUX Kontext)."""
    null: NullInput = NullInput.ENCODED
    """What replaces a text or vector when the caption is dropped; other inputs are kept."""
    rate: float | None = None
    """Latent frames per second of a sound; None for other inputs."""
    rounds_to_nearest: bool = False
    """Whether the number of latent frames of a sound is rounded to the nearest integer, instead of
    up."""
    pictures: int = 0
    """Number of conditioning pictures from which a codec computes the input: 1 is the first frame,
    2 the first and the last frame; 0: the input is not computed from pictures."""
    encoder: str | None = None
    """Text encoder (`dit.codecs.text`) of the published weights; None for inputs without one."""
    refused_encoders: Mapping[str, str] = field(default_factory=dict)
    """Maps names of text encoders whose output is refused despite its equal width, to the setting
    with which a network of the family takes it, such as `model.text_conditioner=stored`."""

    def sound_frames(self, seconds: float) -> int:
        """Number of latent frames to generate for a sound of `seconds`; `rate` must be set."""
        assert self.rate is not None, f"{self.name} has no rate"
        frames = seconds * self.rate
        return max(1, round(frames)) if self.rounds_to_nearest else math.ceil(frames - 1e-6)


def text_input(
    model: ModelConfig, *, encoder: str, may_be_empty: bool = False, most_rows: int | None = None
) -> SampleInput:
    """The input `text`: the states of the caption from the main text encoder, `encoder`."""
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
    """The input `pooled_text`: one vector of the caption from a second text encoder, `encoder`."""
    width = model.pooled_size
    return SampleInput(name=POOLED, kind=InputKind.VECTOR, width=width, encoder=encoder)


@dataclass(frozen=True, kw_only=True)
class HasReferences:
    """Field of networks whose samples may have references.

    A configuration inherits from this class first, then from `ModelConfig`.
    """

    reference_latents: OfInputs[int] = bounded(0, most=64, least=0)
    """Largest number of reference pictures of a sample; their tokens follow those of the target."""


class _TakesReferences(Protocol):
    @property
    def in_channels(self) -> int: ...
    @property
    def reference_latents(self) -> int: ...


def reference_inputs(model: _TakesReferences, *, clean: bool) -> list[SampleInput]:
    """The inputs `reference_latent_0`, ...: the reference latents of a sample.

    `clean` is `SampleInput.clean`: whether their tokens get `clean_level` as timestep.
    """
    kind, width = InputKind.REFERENCE, model.in_channels
    return [
        SampleInput(name=f"{REFERENCE}_{n}", kind=kind, width=width, required=False, clean=clean)
        for n in range(model.reference_latents)
    ]


def null_text_inputs(model: ModelConfig) -> tuple[SampleInput, ...]:
    """The input `null_text`: text states that replace a dropped caption, as a tuple of one input.

    It is for encoders that also see the sample's pictures, so each sample stores its own states.
    """
    null: Any = {"kind": InputKind.NULL_TEXT, "required": False, "may_be_empty": True}
    return (SampleInput(name="null_text", width=model.crossattn_emb_size, **null),)


@dataclass(frozen=True, kw_only=True)
class HasGuidance:
    """Field of networks with an optional guidance embedding.

    A configuration inherits from this class first, then from `ModelConfig`.
    """

    guidance_embed: bool = True
    """Whether the network gets a guidance scale, `objective.guidance`."""


GUIDANCE = 1.0
"""Guidance scale that the guidance embedding gets in training; 1 stands for no guidance."""


def guidance_told(scale: float = GUIDANCE) -> Callable[[HasGuidance], float | None]:
    """A function for `Family.guidance`.

    It returns `scale` for networks with a guidance embedding, None for networks without one.
    """
    return lambda model: scale if model.guidance_embed else None


def grid_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` with positions (frame, row, column), independent of the frame rate."""
    return resolve_name("dit.models.positions:GridPositions")()


def time_offset_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` with positions (time, row, column, index in the text).

    The target and its references have different times.
    """
    return resolve_name("dit.models.positions:TimeOffsetPositions")()


def half_step_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` with positions (frame, row / 2, column / 2, index).

    The index is the token's index in the text, 0 for the target, and negative for references.
    """
    return resolve_name("dit.models.positions:HalfStepPositions")()


def far_picture_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` with positions (index, row, column), in which pictures follow all text."""
    return resolve_name("dit.models.positions:FarPicturePositions")()


def references_first_positions(_: ModelConfig) -> PositionRule:
    """`Family.positions` with positions (index, row, column, picture); references come first."""
    return resolve_name("dit.models.positions:ReferencesFirstPositions")()


class ConditionPositions(Protocol):
    """A function that computes the positions of a conditioning picture's or clip's tokens."""

    def __call__(self, grid: Grid, *, frame: int, fps: float) -> Tensor:
        """The positions [tokens, axes], float32, of a condition with `grid` patches.

        `frame` is the frame of the video at which the condition begins; `fps` is the frame rate, or
        NaN if unknown.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionRules:
    """Rules for pictures and clips that condition a video and may begin at any of its frames."""

    positions: ConditionPositions
    temporal_stride: int
    """Number of video frames per latent frame."""
    prefix_frames: int
    """Number of first latent frames that become additional tokens, if a conditioning clip begins
    after the first frame of the video."""

    def whole_frames(self, frames: int) -> int:
        """The largest number temporal_stride * n + 1 that is at most `frames`.

        A clip with this number of frames has a whole number of latent frames.
        """
        return (frames - 1) // self.temporal_stride * self.temporal_stride + 1


class KeptNorm(StrEnum):
    """Norm rescaling of guidance: which numbers get the norm of the conditional prediction."""

    TOKEN = "token"  # all numbers of a token (Qwen-Image)
    TOKEN_AT_MOST = "token at most"  # the same, only if guidance increases it (LongCat-Image)
    PICTURE_ROW = "picture row"  # a row of latent pixels of one channel (Lumina Image 2.0)


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

    `StackedTransformer` converts according to this field and `sign`, so other code only sees t and
    noise - data.
    """
    clean_level: float | None = 0.0
    """Noise level t of clean tokens, such as tokens of a given first frame; None: the family has no
    clean tokens."""
    guides_by_references: bool = False
    """Whether guidance has a second scale, which moves the prediction away from a prediction
    without references."""
    keeps_norm: Callable[[Any], KeptNorm | None] = lambda _: None
    """Maps a configuration to the norm rescaling of guidance; None: guidance does not rescale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """Patterns (`fnmatch`) of weight names, for initialisation, weight decay and training."""

    zero: tuple[str, ...] = ()
    """Matrices that start at zero, as all biases do."""
    no_decay: tuple[str, ...] = ()
    """Embeddings and tables that get no weight decay; biases and norms get none in any family."""
    fixed: tuple[str, ...] = ()
    """Weights that are stored in checkpoints but never trained, such as tables of positions."""
    sound: tuple[str, ...] = ()
    """Weights that only sound tokens use, in networks with sound."""
    hears: tuple[str, ...] = ()
    """Weights of the attention of video tokens to sound, which samples without sound do not use."""

    def starts_at_zero(self, name: str) -> bool:
        """Whether the matrix with this name in checkpoints starts at zero."""
        return any(fnmatchcase(name, pattern) for pattern in self.zero)

    def stream(self, name: str) -> LoraStreams:
        """The stream (video, sound or both) whose tokens use the weight `name`.

        Weights of the attention of video tokens to sound (`hears`) count as both.
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
    """Imports and returns the network's class, whose arguments are (configuration, process groups,
    virtual pipeline stage)."""
    spec: Callable[[Any], NetworkSpec]
    """Maps a configuration to the specification of its layers."""
    parts: Mapping[str, str]
    """Maps a word in names of weights to the part of the model, such as `attention`, in whose
    gradient norm (`grad_norm_*`) these weights are counted."""
    diffusers: Callable[[], DiffusersForm] | None = None
    """Imports and returns the description of the family's class in Diffusers; None: there is no
    such class, and weights cannot be converted."""
    names: Callable[[], NameTable] | None = None
    """Imports and returns the name table of weight files, for families without a class in
    Diffusers. If both this and `diffusers` are None, the network supports neither adapters, nor
    Muon, nor parameter groups."""
    inputs: Callable[[Any], tuple[SampleInput, ...]]
    """Maps a configuration to the inputs of a sample besides its latent."""
    positions: Callable[[Any], PositionRule]
    """Maps a configuration to the rule that gives tokens their positions."""
    weights: WeightRules
    objective: ObjectiveConventions
    conditions: Callable[[Any], ConditionRules | None] = lambda _: None
    """Maps a configuration to the rules for conditioning pictures and clips that begin at any
    frame; None: such conditions are not supported."""
    guidance: Callable[[Any], float | None] = lambda _: None
    """Maps a configuration to the default of `objective.guidance`; None: the network has no
    guidance embedding."""
    tells_step_end: Callable[[Any], bool] = lambda _: False
    """Maps a configuration to whether the network also gets the timestep at which a sampling step
    ends (mean flow, flow maps)."""
    trains_step_end: bool = False
    """Whether networks that get the end of a step can be trained: training passes the sample's own
    timestep as the end. If False, they can only generate."""
    vae: Callable[[Any], str]
    """Maps a configuration to the name of the VAE (`dit.codecs.vae`) of the published weights."""
    distilled: Collection[str] = ()
    """Names of sizes whose published weights are distilled to few steps, if this cannot be seen
    from Diffusers' pipeline class."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Maps names of published networks that the family does not support to the feature that they
    need."""
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Maps some named sizes to keys of `model` for a tiny network of the same architecture in
    float32, which trains in seconds on a CPU. It has at least four layers, and numbers of heads and
    widths that are multiples of four, so that it runs on up to four ranks."""

    def default(self) -> ModelConfig:
        """The family's default configuration."""
        return self.config()  # type: ignore[call-arg]

    def unguided_by_references(self, model: ModelConfig) -> str:
        """Why a guidance scale for references has no effect on the network of `model`.

        The message is empty if the scale has an effect.
        """
        if not self.objective.guides_by_references:
            return f"model.family={self.name} has no guidance for references"
        if any(one.kind is InputKind.REFERENCE for one in self.inputs(model)):
            return ""
        return f"this model.family={self.name} takes no references (model.reference_latents=0)"

    @property
    def sizes(self) -> Mapping[str, Mapping[str, Any]]:
        """The fields of `model` that each named size sets."""
        return self.config.sizes

    @property
    def keys_of_sizes(self) -> dict[str, dict[str, Any]]:
        """The settings of each named size, by full key, such as `model.num_layers`."""
        return {
            size: {f"model.{key}": value for key, value in values.items()}
            | {f"objective.{k}": v for k, v in self.objective.of_size.get(size, {}).items()}
            for size, values in self.sizes.items()
        }
