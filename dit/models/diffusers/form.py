"""Diffusers' counterparts of a family's networks: names, configuration, pipelines, arithmetic.

`ConfigKeys` maps config.json of a class of Diffusers, key by key, to fields of our configuration.
"""

# B samples, C latent channels, F H W frames, rows, columns, L text tokens

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, create_model

from dit.config import ModelConfig
from dit.config.checks import Rule

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from dit.batch import LatentSample
    from dit.models.diffusers.names import NameTable, Pair


DIFFUSERS = "diffusers"


class StrictKeys(BaseModel):
    """Keys of a config.json, typed as in JSON: 1.0 is no integer, 1 no boolean, NaN no number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class OpenKeys(StrictKeys):
    """Keys of a file of Diffusers; keys that its class does not have are in `model_extra`."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True)
class Key:
    """Key of Diffusers' config.json, and the field of our `model` with the same meaning.

    `read` computes the field from all keys, `write` the key from our network; both are needed only
    where key and field have different values. With several fields, `read` returns as many values. A
    key with neither field nor `write` is exported with Diffusers' default.
    """

    name: str
    field: str | tuple[str, ...] | None = None
    default: Any = None
    """Default value of the key in Diffusers."""
    type: Any = None
    """Type of the value; None: the type of the default, with positive numbers only."""
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    write_trained: Callable[[Any, int | None], Any] | None = None
    """(configuration, tokens of the longest pack in training) -> value; replaces `write`."""
    written: Callable[[Any], bool] = lambda _: True
    """Whether an export of this configuration contains the key."""

    def settings(self, t: Any) -> dict[str, Any]:
        """Fields of our `model` that the key determines; `t` has all keys of config.json."""
        if self.field is None:
            return {}
        value = getattr(t, self.name) if self.read is None else self.read(t)
        if isinstance(self.field, str):
            return {self.field: value}
        return dict(zip(self.field, value, strict=True))

    def value(self, model: ModelConfig, longest: int | None) -> Any:
        """The value of the key in an export of `model`; `longest` as in `ConfigKeys.content`."""
        if self.write_trained is not None:
            return self.write_trained(model, longest)
        if self.write is not None:
            return self.write(model)
        return getattr(model, self.field) if isinstance(self.field, str) else self.default


def same(name: str, default: Any, **options: Any) -> Key:
    """A key with the name of our field."""
    return Key(name, name, default, **options)


def never(_: Any) -> bool:
    """Always False: `Key.written` of keys that an export leaves at Diffusers' default."""
    return False


def heads_of(width: int) -> Key:
    """The key for the width of a head, where `num_attention_heads` has the number of heads."""
    return Key(
        "attention_head_dim",
        "hidden_size",
        width,
        read=lambda t: t.num_attention_heads * t.attention_head_dim,
        write=lambda m: m.hidden_size // m.num_attention_heads,
    )


VIDEO_PATCH = Key(
    "patch_size",
    ("patch_temporal", "patch_spatial"),
    (1, 2, 2),
    read=lambda t: t.patch_size[:2],
    write=lambda m: (m.patch_temporal, m.patch_spatial, m.patch_spatial),
)
"""Patch size (frames, rows, columns); rows = columns is a rule of the family."""


@dataclass(frozen=True, slots=True)
class OwnKey:
    """Field of ours without a key in Diffusers' config.json; exports add a private key for it."""

    field: str
    type: Any
    published: Callable[[Any], Any] | None
    """All keys of a config.json not written by us -> value of the field. None: the file does not
    determine it; the pipeline's class or the user sets it."""
    read: Callable[[Any], Any] = lambda value: value
    default: Any = ...
    """Value for our exports that lack the private key; `...`: all exports have it."""
    may_be_told: bool = False
    """Whether a user may override the value that published weights have."""


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Conversion between config.json of one Diffusers class and our `model`, in both directions.

    Its methods raise nothing for a user's mistakes.
    """

    keys: tuple[Key, ...]
    """Keys of config.json, in the order in which an export writes them."""
    kept: tuple[OwnKey, ...] = ()
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """Rules that a config.json must satisfy; each names the feature that our network lacks."""

    @cached_property
    def file(self) -> type[BaseModel]:
        """A type with the keys and Diffusers' defaults; other keys are kept in `model_extra`."""
        fields: Any = {
            key.name: (key.type or _type_of(key.default), key.default) for key in self.keys
        }
        return create_model("Keys", __base__=OpenKeys, **fields)

    @cached_property
    def kept_file(self) -> type[BaseModel]:
        """A type with the private keys that an export adds to config.json."""
        fields: Any = {one.field: (one.type, one.default) for one in self.kept}
        return create_model("PrivateKeys", __base__=StrictKeys, **fields)

    def unsupported(self, t: Any) -> list[str]:
        """Features of file `t` that our network lacks, in words; unknown keys are not listed."""
        return [message for holds, message in self.rules(t) if not holds]

    def settings(self, t: Any, kept: Any, told: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the family, from a `file` and, if we wrote it, from its `kept_file`.

        Otherwise fields that the user has `told` override those of published weights.

        Raises:
            ValueError: our field cannot have a value.
        """
        if kept is None:
            usual = {one.field: one.published for one in self.kept}
            found = {name: of(t) for name, of in usual.items() if of is not None} | dict(told)
        else:
            found = {one.field: one.read(getattr(kept, one.field)) for one in self.kept}
        t = SimpleNamespace(**dict(t), kept=SimpleNamespace(**found))
        for key in self.keys:
            found |= key.settings(t)
        return found

    def content(self, model: ModelConfig, *, longest: int | None = None) -> dict[str, Any]:
        """config.json of a network, without private keys.

        `longest` is the number of tokens of the longest pack in its training; None without data.
        """
        return {key.name: key.value(model, longest) for key in self.keys if key.written(model)}

    @property
    def untold(self) -> tuple[str, ...]:
        """Fields that a config.json from elsewhere does not determine."""
        return tuple(one.field for one in self.kept if one.published is None)

    @property
    def tellable(self) -> tuple[str, ...]:
        """Fields that a user may set because the config.json does not determine them."""
        return tuple(one.field for one in self.kept if one.published is None or one.may_be_told)

    def told(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `tellable` that a user has set, from `given`.

        Raises:
            ValueError: our field cannot have a value.
        """
        reads = {one.field: one.read for one in self.kept if one.field in self.tellable}
        values = {key: given.get(key) for key in reads}
        return {key: reads[key](value) for key, value in values.items() if value is not None}

    def private(self, model: ModelConfig) -> dict[str, Any]:
        """The values of the private keys (see `kept_file`)."""
        return {one.field: getattr(model, one.field) for one in self.kept}


def _type_of(default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[tuple(map(_type_of, default))]  # type: ignore[misc]
    numbers = {int: PositiveInt, float: PositiveFloat}
    return numbers.get(type(default), type(default))


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTextProjection:
    """Frozen linear over the text states, whose outputs shards may store instead (Cosmos 2.5)."""

    tensors: tuple[str, ...]
    """Diffusers' names of the projection's tensors; the first is its weight [outputs, inputs]."""
    is_part: Callable[[Any], bool]
    """Whether a network contains the projection."""
    added: Callable[[Any, int], ModelConfig]
    """(configuration for projected texts, width before the projection) -> configuration with the
    projection."""
    removed: Callable[[Any], ModelConfig]
    """Configuration with the projection -> configuration for projected texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBeside:
    """Component that a pipeline needs and its published folder lacks, such as a text encoder."""

    kind: str
    """Class of the component in Transformers."""
    model: str
    """Hub name of the component that the published networks were trained with."""
    has_weights: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """Second network of a pipeline, which one field makes a part of ours (Anima's conditioner)."""

    folder: str
    """Folder of the companion's weights, in a pipeline or beside a lone transformer; also the
    prefix of its tensors in the name table."""
    class_name: str
    module: str = DIFFUSERS
    """Where its class is."""
    field: str
    """Field of `model` that says whether our network contains the companion."""
    value: Any
    """Value of `field` with which our network contains the companion."""
    instead: Any
    """Value of `field` with which shards hold the companion's outputs."""
    keys: ConfigKeys
    """Keys of the companion's config.json, for our whole network with it."""
    frozen: tuple[str, ...] = ()
    """Patterns of tensors of it that our networks lack. One with such tensors is not trained: the
    folder that an import takes it from keeps it, and exports have none."""

    def is_part(self, model: ModelConfig) -> bool:
        return getattr(model, self.field) == self.value

    def has(self, pair: Pair) -> bool:
        """Whether a tensor of the name table belongs to the companion."""
        return pair.theirs[0].startswith(f"{self.folder}.")

    def content(self, model: ModelConfig) -> dict[str, Any]:
        """The companion's config.json."""
        return {"_class_name": self.class_name, **self.keys.content(model)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleFile:
    """The form of the network in a file of its original project, alone or beside other parts."""

    renamed: Callable[[str], str | None]
    """Name of a tensor in the file -> Diffusers'; None for tensors of other parts."""
    config: Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any] | None]
    """Shapes by Diffusers' names -> config.json; None if they are those of another network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A pipeline of Diffusers, and the inputs that it gives its networks."""

    samples: str = "flow"
    """Objective that the pipeline samples (`objective.name`)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `model` that all networks of the pipeline have and config.json does not contain."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that the pipeline's sampling loop fixes, whatever its scheduler says."""
    of_few_steps: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` for networks that model_index.json marks as distilled to few steps."""
    sampling: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    """scheduler_config.json -> sampler keys that the sampling loop fixes."""
    scheduler: Callable[[Any], dict[str, Any]] = lambda _: {}
    """`objective` of a run -> keys of scheduler_config.json that follow from it."""
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """Rules for a network that the pipeline runs as in training; each names the difference."""
    modular: bool = False
    """Whether Diffusers opens and calls the pipeline as a modular one."""
    beside: Mapping[str, PartBeside] = field(default_factory=dict)
    """Components loaded from another repository, by the name of the component."""
    module: str = DIFFUSERS
    """Python module of the pipeline's class; one outside Diffusers allows folders that contain
    code."""

    def fixed(self, scheduler: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of `objective` that the pipeline fixes in addition to its scheduler_config.json."""
        said = self.sampling(scheduler)
        return {key: said.get(key, value) for key, value in self.objective.items()}

    def misfits(self, model: ModelConfig) -> list[str]:
        """Inputs that the pipeline gives the network differently from training, in words."""
        return [message for holds, message in self.rules(model) if not holds]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedSamples:
    """Batch of B samples padded with zeros to one length, for networks that take no packs."""

    latent_BCFHW: Tensor
    inputs: Mapping[str, Tensor]
    """Conditions by name: text states [B, L, E], or vectors [B, E]."""
    is_text_BL: Tensor | None
    """Mask of the main text, False on padding; None if all captions have the same length."""
    level_B: Tensor
    fps: float
    """Frame rate of the videos; NaN for pictures."""


def _told(guidance: float | None) -> dict[str, float]:
    """The guidance scale as an argument of Diffusers' network; none without guidance embedding."""
    return {} if guidance is None else {"guidance": guidance}


def own_names(table: NameTable) -> dict[str, str]:
    """Linears by Diffusers' names, for families whose original projects use these names as well."""
    modules = [
        name.removesuffix(".weight")
        for row in table.rows
        if len(row.shape) == 2 and not row.ours.endswith(".router.weight")
        for name in row.theirs
        if name.endswith(".weight")
    ]
    return dict(zip(modules, modules, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusersForm:
    """Everything that Diffusers needs to know of a family: names, config.json, pipelines.

    Its methods raise nothing for a user's mistakes.
    """

    class_name: str
    """Diffusers' class, as `_class_name` in config.json, which identifies the family of a
    folder."""
    module: str = DIFFUSERS
    """Python module of Diffusers' class."""
    table: NameTable
    """Name table: Diffusers' tensors for each of our tensors."""
    keys: ConfigKeys
    """Keys of config.json and the corresponding fields of our `model`."""
    inexpressible: Callable[[Any], list[str]] = lambda _: []
    """Features of our network that Diffusers' class lacks, in words."""
    text_projection: FrozenTextProjection | None = None
    """Frozen projection of the text states; None if the family has none."""
    companion: Companion | None = None
    """Second network of the pipeline that ours may contain; None if there is none."""
    ignored: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of stored tensors that Diffusers' class does not read."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Patterns (`fnmatch`) of tensors that only our network has and that start at zero -> the
    setting that adds them."""
    beyond: Callable[[Any], str | None] = lambda _: None
    """Tensors of an export that Diffusers' class ignores and what reads them, in words; None: no
    such tensors."""
    original_names: tuple[Mapping[str, str], ...] = ()
    """Tables: name of a linear in an original project -> name in Diffusers; `*` is the number of a
    block.

    Several names with spaces between them are linears that the project fuses: each but the last has
    as many outputs as inputs. `~`: shift and scale are exchanged, for a linear that is not fused.
    """
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Names of linears, as in `original_names`, that weights of published folders have, where they
    are not Diffusers'."""
    single_file: SingleFile | None = None
    """None: no files of an original project are read."""
    comfyui_names: Callable[[Any], Mapping[str, str]] | None = None
    """Table of `original_names` that ComfyUI uses for a network; None: ComfyUI reads Diffusers'
    names."""
    pipelines: Mapping[str, Pipeline]
    """Pipelines that run the family's networks, by class name."""
    refused_pipelines: Mapping[str, str] = field(default_factory=dict)
    """Pipelines of the same config.json and tensors that compute something else -> the missing
    feature."""
    largest_latent: Callable[[Any], tuple[int, int, int]] = lambda _: (2**20, 2**20, 2**20)
    """Largest latent (frames, rows, columns) for Diffusers' network; default: no limit."""
    call: Callable[[Any], str | None] = lambda _: None
    """Python code of model cards that computes `made` from `state` [1, C, F, H, W], `t`, `caption`
    [1, L, E] and `texts`."""
    run_network: Callable[..., Tensor]
    """(Diffusers' network, `LatentSample`, timestep as given to our network, our configuration) ->
    output [C, F, H, W].

    For a network with a guidance embedding, the keyword `guidance` has the scale."""
    run_stacked: Callable[..., Tensor] | None = None
    """(Diffusers' network, `StackedSamples`, our configuration) -> outputs [B, C, F, H, W], for
    comparing speeds.

    For a network with a guidance embedding, the keyword `guidance` has the scale."""

    def run(
        self,
        network: nn.Module,
        sample: LatentSample,
        level: float,
        model: ModelConfig,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """The output of Diffusers' network for a sample, [C, F, H, W].

        `level` (the timestep) and `guidance` (`objective.guidance`) are given as to our network.
        """
        return self.run_network(network, sample, level, model, **_told(guidance))

    def run_side_by_side(
        self,
        network: nn.Module,
        samples: StackedSamples,
        model: ModelConfig,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """Outputs of Diffusers' network for a padded batch [B, C, F, H, W]; needs `run_stacked`."""
        assert self.run_stacked is not None
        return self.run_stacked(network, samples, model, **_told(guidance))

    def companion_of(self, model: ModelConfig) -> Companion | None:
        """The companion, if this network contains one, else None."""
        return self.companion if self.companion and self.companion.is_part(model) else None

    def written_companion(self, model: ModelConfig) -> Companion | None:
        """The second network, if exports have it, else None."""
        second = self.companion_of(model)
        return None if second is None or second.frozen else second

    def is_written(self, pair: Pair, model: ModelConfig) -> bool:
        """Whether exports of a network have the tensors of a pair."""
        second = self.companion_of(model)
        return second is None or not second.frozen or not second.has(pair)

    def filled_network(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
        """Diffusers' network for a config.json, with `weights` in their own precision.

        Raises:
            ImportError: Diffusers is not installed.
            NotImplementedError: Diffusers has no such class.
        """
        network = self._class.from_config(dict(config))
        network.load_state_dict(dict(weights))
        return network.eval()

    @property
    def _class(self) -> Any:
        """Diffusers' class; raises as `open_network`."""
        import diffusers

        if not hasattr(diffusers, self.class_name):
            raise NotImplementedError(f"Diffusers {diffusers.__version__} has no {self.class_name}")
        return getattr(diffusers, self.class_name)

    def open_network(self, folder: Path, second: Path | None = None) -> nn.Module:
        """Diffusers' network of a folder, in float32; `second` has the companion, its child.

        Raises:
            ImportError: Diffusers is not installed.
            NotImplementedError: Diffusers has no such class.
        """
        from torch import float32

        network = self._class.from_pretrained(folder, torch_dtype=float32)
        if second is not None:
            assert self.companion is not None
            kind = getattr(import_module(self.companion.module), self.companion.class_name)
            child = kind.from_pretrained(second, torch_dtype=float32)
            network.add_module(self.companion.folder, child)
        return network
