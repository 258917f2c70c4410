"""The model families: what the rest of the tree asks of a network, and the table of all of them.

A family is one folder in `dit/models/` with one line in `FAMILIES`. Nothing outside of that folder
imports it, names its classes or compares `model.family` with a text: it asks the `Family` of a
configuration (`family_of`). A family is imported when it is first asked for, and neither torch nor
Megatron-Core comes with it: what needs them is imported by the functions below.

`$DIT_FAMILIES` adds families that lie elsewhere, as `name=module:attribute`, with commas between
them. Processes inherit it, so that a test can train a family of its own in several of them. No
configuration can name code to run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dit.config import CUSTOM_SIZE, ModelConfig, Problems, RunConfig, TextPadding
from dit.config.checks import check
from dit.other_networks import why_not_trained

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel
    from torch import Tensor, nn

    from dit.batch import LatentSample
    from dit.models.cost import NetworkCost
    from dit.models.diffusers_names import NameTable
    from dit.models.positions import PositionRule

FAMILIES = {
    "dit": "dit.models.dit.family:FAMILY",
    "wan": "dit.models.wan.family:FAMILY",
    "flux": "dit.models.flux.family:FAMILY",
    "qwen_image": "dit.models.qwen_image.family:FAMILY",
    "hunyuan_video": "dit.models.hunyuan_video.family:FAMILY",
    "hunyuan_video_15": "dit.models.hunyuan_video_15.family:FAMILY",
    "sd3": "dit.models.sd3.family:FAMILY",
    "hunyuan_image": "dit.models.hunyuan_image.family:FAMILY",
    "chroma": "dit.models.chroma.family:FAMILY",
}
"""Name -> where its `Family` is. The first one is that of configurations that name none."""
VARIABLE = "DIT_FAMILIES"


class InputKind(StrEnum):
    """What a sample holds beside its latent."""

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


class Padding(StrEnum):
    """What rows of text a network sees beyond those of the encoder."""

    NONE = "none"
    ZEROS = "zeros"  # up to a length
    STORED = "stored"  # the encoder's own for padding, as the shards hold them


class NullInput(StrEnum):
    """What stands for an input where a caption is dropped (classifier-free guidance)."""

    ENCODED = "encoded"  # the encoder's of an empty caption
    EMPTY = "empty"  # no rows
    KEPT = "kept"  # the sample's own


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInput:
    """One tensor of a sample beside its latent."""

    name: str
    """Its name in a shard."""
    kind: InputKind
    width: int
    """Numbers in a row, or channels."""
    required: bool = True
    """Whether a sample without it is refused; one without an input that is not is trained on."""
    may_be_empty: bool = False
    """Whether 0 rows are legal."""
    rows: int | None = None
    """Rows that each sample must have, as image encoders make them; None: any number."""
    clean: bool = True
    """Whether a reference latent is told the clean level; FLUX Kontext's is told the sample's."""
    null: NullInput = NullInput.ENCODED
    """Of texts and vectors; a sample keeps its inputs of the other kinds."""
    padding: Padding = Padding.NONE
    length: int | None = None
    """Rows after padding with zeros."""
    pictures: int = 0
    """Given pictures that the codec makes it of: 1, the first frame; 2, the last one, too."""
    encoder: str | None = None
    """Text encoder (`dit.codecs.text`) of the published weights; None for inputs that have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConventions:
    """What an objective must know of a family's networks."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that choosing the family sets, below all explicit ones."""
    of_size: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Those that choosing a named size sets over them, such as `level_range` of an expert."""
    sign: int = 1
    """1: the velocity that flow matching learns is noise - data; -1: data - noise (Lumina 2)."""
    tells_data_part: bool = False
    """Whether flow matching tells the network 1 - t instead of t (Lumina 2, OmniGen2)."""
    clean_level: float | None = 0.0
    """t of tokens without noise, such as a given first frame; None: there are no such tokens."""
    keeps_norm: bool = False
    """Whether guidance leaves each token the norm of its prediction (Qwen-Image)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """Patterns of names of weights, as in `fnmatch`."""

    zero: tuple[str, ...] = ()
    """Matrices that start at zero, as all biases do."""
    no_decay: tuple[str, ...] = ()
    """Without weight decay, beside biases and norms: embeddings, tables."""
    float32: tuple[str, ...] = ()
    """Computed with in float32 whatever `model.precision` says."""
    fixed: tuple[str, ...] = ()
    """Names of tables that checkpoints hold and nothing trains: buffers, filled by their module."""

    def starts_at_zero(self, name: str) -> bool:
        """Whether a matrix starts at zero, by its key in a checkpoint."""
        return any(fnmatchcase(name, pattern) for pattern in self.zero)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTextProjection:
    """A frozen first layer of text, where shards may hold what it makes (Cosmos 2.5)."""

    tensors: tuple[str, ...]
    """Diffusers' names of its weight [made, read] and others."""
    is_part: Callable[[Any], bool]
    """Whether a network has it."""
    added: Callable[[Any, int], ModelConfig]
    """(network of projected texts, numbers of a row before it) -> the network with it."""
    removed: Callable[[Any], ModelConfig]
    """The network with it -> that of projected texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedSamples:
    """B samples side by side, shorter ones padded with zeros, as loops without packs have them."""

    latent_BCFHW: Tensor
    inputs: Mapping[str, Tensor]
    """By name: [B, L, E] of a text, [B, E] of a vector."""
    is_text_BL: Tensor | None
    """False on padding of the main text; None where all captions have the same length."""
    level_B: Tensor
    fps: float
    """NaN for pictures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusersForm:
    """The networks of a family as Diffusers has them. Nothing here raises for what a user gave."""

    class_name: str
    """`_class_name` of config.json, by which a folder is known to be of this family."""
    table: NameTable
    """Which tensors of theirs are which of ours."""
    config_keys: type[BaseModel]
    """The keys of config.json with Diffusers' own defaults; others are kept in `model_extra`."""
    private_keys: type[BaseModel]
    """What an export keeps in config.json that Diffusers has no place for."""
    unsupported: Callable[[Any], list[str]]
    """What of `config_keys` our network has no counterpart for, in words; not unknown keys."""
    settings: Callable[[Any, Any, Any], dict[str, Any]]
    """(`config_keys`, `private_keys` if ours wrote them, text_pad_to) -> fields of the family."""
    inexpressible: Callable[[RunConfig], list[str]] = lambda _: []
    """What of a run Diffusers' network has no counterpart for, in words."""
    content: Callable[[RunConfig], dict[str, Any]]
    """config.json of a run's network, without private keys."""
    text_pad_to: Callable[[Any], int | TextPadding | None] = lambda _: None
    """`config_keys` -> `model.text_pad_to` of the published weights."""
    text_projection: FrozenTextProjection | None = None
    """None: no shards hold projected texts of the family."""
    ignored: tuple[str, ...] = ()
    """Patterns, as in `fnmatch`, of stored tensors that Diffusers' class does not read."""
    original_names: tuple[Mapping[str, str], ...] = ()
    """Tables of linears as the original projects name them -> as Diffusers does; `*`: a block.

    Several names with spaces between them are linears that the project has as one: each but the
    last has as many outputs as inputs. `~`: shift and scale have changed places, if alone."""
    comfyui_names: Callable[[Any], Mapping[str, str]] | None = None
    """The one of `original_names` that ComfyUI has of a network; None: it reads Diffusers'."""
    pipelines: Mapping[str, str]
    """Pipeline that runs these networks -> name of the objective that it samples."""
    settings_of_pipelines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Pipeline -> fields of the family that its networks have and config.json does not tell."""
    pipeline_objectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Pipeline -> keys of `objective` that its loop fixes, whatever its scheduler says."""
    sampling_settings: Callable[[str, Mapping[str, Any]], dict[str, Any]] = lambda *_: {}
    """(one of `pipeline_objectives`, its scheduler_config.json) -> keys for the samplers."""
    pipeline_misfits: Callable[[Any, str], list[str]] = lambda *_: []
    """(network, pipeline) -> what the pipeline feeds otherwise than in training, in words."""
    largest_latent: Callable[[Any], tuple[int, int, int]] = lambda _: (2**20, 2**20, 2**20)
    """Latent frames, rows and columns that Diffusers' network takes at most; default: any."""
    call: Callable[[Any], str | None] = lambda _: None
    """Python for cards: `made`, from `state` [1, C, F, H, W], `t`, `caption` [1, L, E], `texts`."""
    run_network: Callable[[nn.Module, LatentSample, float, RunConfig], Tensor]
    """(Diffusers' network, sample, level that ours is told, run) -> output [C, F, H, W]."""
    run_stacked: Callable[[nn.Module, StackedSamples, RunConfig], Tensor] | None = None
    """The same of samples side by side -> [B, C, F, H, W], by which speeds are compared."""

    def private(self, model: ModelConfig) -> dict[str, Any]:
        """The values of `private_keys`."""
        return {name: getattr(model, name) for name in self.private_keys.model_fields}

    def open_network(self, folder: Path) -> nn.Module:
        """Diffusers' network of a folder, in float32.

        Raises:
            ImportError: Diffusers is not installed.
        """
        import diffusers
        from torch import float32

        return getattr(diffusers, self.class_name).from_pretrained(folder, torch_dtype=float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a model family says of itself: data, and small pure functions of its configuration."""

    name: str
    """`model.family`."""
    config: type[ModelConfig]
    """Its configuration, with its own fields, their rules and its named sizes."""
    network: Callable[[], Callable[..., Any]]
    """Imports the network, which is built with (configuration, process groups, virtual stage)."""
    cost: Callable[[Any], NetworkCost]
    """Describes the layers: parameters, operations and memory are sums over the description."""
    parts: Mapping[str, str]
    """A word in the names of its weights -> the part of the model whose gradient norm is logged."""
    diffusers: Callable[[], DiffusersForm] | None = None
    """Imports what Diffusers calls all this; None: it has no such network, and nothing converts."""
    inputs: Callable[[Any], tuple[SampleInput, ...]]
    """What a sample holds beside its latent, of a configuration."""
    positions: Callable[[Any], PositionRule]
    """Imports the rule by which tokens have positions, of a configuration."""
    weights: WeightRules
    objective: ObjectiveConventions
    guidance: Callable[[Any], float | None] = lambda _: None
    """The usual `objective.guidance` of a configuration; None: it has no guidance embedding."""
    tells_step_end: Callable[[Any], bool] = lambda _: False
    """Whether the end of a step is told, too (mean flow): it generates, and is not trained."""
    vae: Callable[[Any], str]
    """Codec (`dit.codecs.vae`) whose latents the published weights read, of a configuration."""
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Named size -> keys of `model` that make a float32 network of it which trains in seconds on a
    CPU: one for each kind of network. It has at least four layers, and heads and widths that divide
    by four, so that it runs on layouts of up to four ranks."""

    def default(self) -> ModelConfig:
        """The default network: every field of `config` has a default."""
        return self.config()  # type: ignore[call-arg]

    @property
    def sizes(self) -> Mapping[str, Mapping[str, Any]]:
        """What each named size of the family sets."""
        return self.config.sizes

    @property
    def keys_of_sizes(self) -> dict[str, dict[str, Any]]:
        """The same by dotted keys of a run, with those of `objective`."""
        return {
            size: {f"model.{key}": value for key, value in values.items()}
            | {f"objective.{k}": v for k, v in self.objective.of_size.get(size, {}).items()}
            for size, values in self.sizes.items()
        }


def family_places() -> dict[str, str]:
    """Name -> `module:attribute` of every family, those of `$DIT_FAMILIES` too.

    Raises:
        Problems: an entry of the variable is not of the form name=module:attribute.
    """
    places = dict(FAMILIES)
    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, equals, place = entry.strip().partition("=")
        if not (name and equals and ":" in place):
            raise Problems([f"${VARIABLE}: {entry!r} is not of the form name=module:attribute"])
        places[name] = place
    return places


def default_family() -> Family:
    """The family of a configuration that names none."""
    return family_named(next(iter(FAMILIES)))


def family_named(name: str) -> Family:
    """The family that `model.family` names.

    Raises:
        Problems: there is no such family.
    """
    places = family_places()
    if name not in places:
        lacking = why_not_trained(name)
        raise Problems(
            [
                f"model.family={name} is no known family; use {', '.join(places)}, or say in"
                f" ${VARIABLE} where it is" + (f". {lacking}" if lacking else "")
            ]
        )
    return _loaded(name, places[name])


def imported(place: str) -> Callable[[], Any]:
    """What `module:attribute` names, imported when it is called."""
    module, _, attribute = place.partition(":")
    return lambda: getattr(import_module(module), attribute)


@cache
def _loaded(name: str, place: str) -> Family:
    family = imported(place)()
    assert family.name == name, f"{place} calls its family {family.name}, not {name}"
    return family


def family_of(model: ModelConfig) -> Family:
    """The family of a network."""
    return family_named(model.family)


def families(*, first: str | None = None) -> list[Family]:
    """All families, `first` before the others."""
    names = sorted(family_places(), key=lambda name: name != first)
    return [family_named(name) for name in names]


def family_of_size(size: str, *, first: str) -> Family | None:
    """The family with a named size, where `first` is looked at before the others are imported."""
    if size == CUSTOM_SIZE or size in family_named(first).sizes:
        return family_named(first)
    return next((one for one in families(first=first) if size in one.sizes), None)


def diffusers_families() -> dict[str, Family]:
    """Class of Diffusers' network -> family."""
    return {one.diffusers().class_name: one for one in families() if one.diffusers is not None}


def diffusers_form(model: ModelConfig) -> DiffusersForm:
    """A network as Diffusers has it.

    Raises:
        Problems: it has no such network.
    """
    form = family_of(model).diffusers
    if form is None:
        raise Problems([f"Diffusers has no network of model.family={model.family}"])
    return form()


def check_trainable(config: RunConfig) -> None:
    """Refuses networks that only generate.

    Raises:
        Problems: names the key.
    """
    check(
        (
            not family_of(config.model).tells_step_end(config.model),
            "model.use_meanflow=true: the network was distilled to predict the mean velocity of"
            " whole steps (mean flow), which no objective here teaches; train the network that it"
            " was distilled from, and generate with this one",
        )
    )


def check_objective_inputs(config: RunConfig) -> None:
    """Refuses what of the objective concerns inputs that the network or its samples do not have.

    Raises:
        Problems: names the keys.
    """
    wanted, family = config.objective, family_of(config.model)
    inputs = family.inputs(config.model)
    frames = [one for one in inputs if one.kind is InputKind.FRAMES]
    which = f"the network (model.family={family.name}, model.name={config.model.name})"
    if not frames:
        why = f"{which} takes no given frames; leave it out"
    else:
        why = f"{which} needs `{frames[0].name}` of every sample; leave it out"
    shown = frames or [one for one in inputs if one.kind is InputKind.FRAME_CHANNELS]
    optional = any(not one.required for one in shown)
    of_image = any(one.kind is InputKind.CHANNELS or one.null is NullInput.KEPT for one in inputs)
    p, counts = wanted.image_condition_probability, wanted.given_frames
    usual, told = family.guidance(config.model), wanted.guidance
    check(
        (
            usual is None or told is not None,
            f"objective.guidance=null: {which} is told a guidance scale; set it to {usual}, or to"
            " what the weights were distilled for",
        ),
        (
            usual is not None or told is None,
            f"objective.guidance={told}: {which} has no guidance embedding; leave it out",
        ),
        (p == 1 or optional, f"objective.image_condition_probability={p}: {why}"),
        (
            counts is None or (optional and bool(frames)),
            f"objective.given_frames={list(counts or ())}: {why}",
        ),
        (
            wanted.image_dropout == 0 or of_image,
            f"objective.image_dropout={wanted.image_dropout}: {which} takes no condition channels"
            " and no image rows; leave it out",
        ),
    )


def named_model(size: str) -> ModelConfig:
    """The network of a named size.

    Raises:
        Problems: no family has it.
    """
    family = family_of_size(size, first=default_family().name)
    if family is None:
        raise Problems([f"model.name={size} is a size of no family"])
    return family.config(name=size, **family.sizes[size])
