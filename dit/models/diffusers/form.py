"""Diffusers' counterparts of a family's networks: names, configuration, pipelines, arithmetic.

`ConfigKeys` maps config.json of a class of Diffusers, key by key, to fields of our configuration.
"""

# B samples, C latent channels, F H W frames, rows, columns, L text tokens

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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
_NUMBERS: Mapping[Any, str] = {int: "a whole number", float: "a number"}


class StrictKeys(BaseModel):
    """Pydantic model of a config.json's keys, typed as in JSON.

    1.0 is no integer, 1 is no boolean, NaN is no number, and unknown keys are refused.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class OpenKeys(StrictKeys):
    """Pydantic model of the keys of a Diffusers file, typed as in JSON.

    Unknown keys are in `model_extra`.
    """

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of Diffusers' config.json, and the field of our `model` with the same meaning.

    `read` computes the field from all keys, `write` the key from our configuration; both are needed
    only where key and field have different values. If `field` has several names, `read` returns a
    value for each. A key with neither `field` nor `write` is exported with Diffusers' default.
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
    """Computes the key's value from (configuration, tokens of the longest pack in training), in
    place of `write`."""
    written: Callable[[Any], bool] = lambda _: True
    """Whether the export of a configuration contains the key."""

    def settings(self, t: Any) -> dict[str, Any]:
        """Fields of our `model` that the key determines; `t` has all keys of a config.json."""
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
    """The key `name` of config.json, whose field in our `model` has the same name and value."""
    return Key(name, name, default, **options)


def never(_: Any) -> bool:
    """Always False: `Key.written` of keys that an export leaves at Diffusers' default."""
    return False


def heads_of(width: int) -> Key:
    """The key for a head's width, in classes whose `num_attention_heads` is the number of heads.

    `width` is Diffusers' default.
    """
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
"""The key for the size of a patch, (frames, rows, columns); a family's rule is that rows =
columns."""


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A field of ours that Diffusers' config.json has no key for; exports add a private key."""

    field: str
    type: Any
    published: Callable[[Any], Any] | None
    """Computes the field from all keys of a config.json that we did not write. None: the file does
    not determine it; the pipeline's class or the user sets it."""
    read: Callable[[Any], Any] = lambda value: value
    default: Any = ...
    """Value of the field for exports of ours that lack the private key; `...`: all exports have
    it."""
    may_be_told: bool = False
    """Whether a user may set the field of published weights, too."""


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Conversion between the config.json of a Diffusers class and our `model`, both ways.

    Methods return messages about settings that do not fit, and raise only what their `Raises`
    lists.
    """

    keys: tuple[Key, ...]
    """Keys of config.json, in the order in which an export writes them."""
    kept: tuple[OwnKey, ...] = ()
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """Rules that a config.json must satisfy; each message names the feature that our network
    lacks."""

    @cached_property
    def file(self) -> type[BaseModel]:
        """A Pydantic model of config.json with Diffusers' defaults; it keeps unknown keys.

        They are in its `model_extra`.
        """
        fields: Any = {
            key.name: (key.type or _type_of(key.default), key.default) for key in self.keys
        }
        return create_model("Keys", __base__=OpenKeys, **fields)

    @cached_property
    def kept_file(self) -> type[BaseModel]:
        """A Pydantic model of the private keys that an export adds to config.json."""
        fields: Any = {one.field: (one.type, one.default) for one in self.kept}
        return create_model("PrivateKeys", __base__=StrictKeys, **fields)

    def unsupported(self, t: Any) -> list[str]:
        """A message for each feature of the config.json `t` that our network lacks.

        Unknown keys are not among them.
        """
        return [message for holds, message in self.rules(t) if not holds]

    def settings(self, t: Any, kept: Any, told: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of our `model`, by name, from a config.json `t` and the private keys of an export.

        `kept` has the private keys; None if we did not write the file. Only in that case fields
        that the user has set, `told`, count; they override those of published weights.

        Raises:
            ValueError: a field cannot have its value.
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
        """The config.json of the network of `model`, without private keys.

        `longest` is the number of tokens of the longest pack in its training; None without data.
        """
        return {key.name: key.value(model, longest) for key in self.keys if key.written(model)}

    @property
    def untold(self) -> tuple[str, ...]:
        """Fields that are not determined by a config.json, if we did not write it."""
        return tuple(one.field for one in self.kept if one.published is None)

    @property
    def tellable(self) -> tuple[str, ...]:
        """Fields that a user may set if we did not write the config.json."""
        return tuple(one.field for one in self.kept if one.published is None or one.may_be_told)

    def told(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `tellable` that a user has set: those with a value other than None in `given`.

        Raises:
            ValueError: a field cannot have its value.
        """
        reads = {one.field: one.read for one in self.kept if one.field in self.tellable}
        values = {key: given.get(key) for key in reads}
        return {
            key: _read(key, value, reads[key]) for key, value in values.items() if value is not None
        }

    def private(self, model: ModelConfig) -> dict[str, Any]:
        """The private keys that an export of `model` adds to config.json (see `kept_file`)."""
        return {one.field: getattr(model, one.field) for one in self.kept}


def _read(key: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """What `read` makes of the `value` that a user gives for the field `key`."""
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(read, type) and issubclass(read, StrEnum):
            wanted = " or ".join(read)
        else:
            wanted = _NUMBERS.get(read, str(error))
        raise ValueError(f"model.{key}={value} must be {wanted}") from None


def _type_of(default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[tuple(map(_type_of, default))]  # type: ignore[misc]
    numbers = {int: PositiveInt, float: PositiveFloat}
    return numbers.get(type(default), type(default))


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTextProjection:
    """A frozen linear over text states, whose outputs shards may store instead (Cosmos 2.5)."""

    tensors: tuple[str, ...]
    """Diffusers' names of the projection's tensors; the first is its weight [outputs, inputs]."""
    is_part: Callable[[Any], bool]
    """Whether the network of a configuration contains the projection."""
    added: Callable[[Any, int], ModelConfig]
    """Maps a configuration for projected texts, and the width before the projection, to the
    configuration with the projection."""
    removed: Callable[[Any], ModelConfig]
    """Maps a configuration with the projection to that for projected texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBeside:
    """A component that a pipeline needs and its published folder lacks, such as a text encoder."""

    kind: str
    """Class of the component in Transformers."""
    model: str
    """Hub name of the component that the published networks were trained with."""
    has_weights: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """The second network of a pipeline, which a field makes part of ours (Anima's conditioner)."""

    folder: str
    """Folder of the companion's weights, in a pipeline or beside a transformer alone; also the
    prefix of its tensors in the name table."""
    class_name: str
    module: str = DIFFUSERS
    """Python module of the companion's class."""
    field: str
    """Field of `model` that says whether our network contains the companion."""
    value: Any
    """Value of `field` with which our network contains the companion."""
    instead: Any
    """Value of `field` with which shards hold the companion's outputs."""
    keys: ConfigKeys
    """Keys of the companion's config.json, and the fields of our whole network that they set."""
    frozen: tuple[str, ...] = ()
    """Patterns of the companion's tensors that our networks lack. A companion with such tensors is
    not trained: exports do without it, because the folder that it was imported from has it."""

    def is_part(self, model: ModelConfig) -> bool:
        return getattr(model, self.field) == self.value

    def has(self, pair: Pair) -> bool:
        """Whether the tensors of `pair` belong to the companion."""
        return pair.theirs[0].startswith(f"{self.folder}.")

    def content(self, model: ModelConfig) -> dict[str, Any]:
        """The companion's config.json, for our whole network `model`."""
        return {"_class_name": self.class_name, **self.keys.content(model)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleFile:
    """The network's form in a file of its original project, alone or with other parts."""

    renamed: Callable[[str], str | None]
    """Maps the name of a tensor in the file to Diffusers' name; None for tensors of other parts."""
    config: Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any] | None]
    """Maps shapes by Diffusers' names to the config.json; None if they are those of another
    network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A pipeline of Diffusers, and the inputs that it gives its networks."""

    samples: str = "flow"
    """Objective that the pipeline samples (`objective.name`)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `model` that all networks of the pipeline have in common, and that config.json does
    not contain."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that the pipeline's sampling loop determines, whatever its scheduler
    says."""
    of_few_steps: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` for networks that model_index.json marks as distilled to few steps."""
    sampling: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    """Maps a scheduler_config.json to the sampler's keys of `objective` that the sampling loop
    determines."""
    scheduler: Callable[[Any], dict[str, Any]] = lambda _: {}
    """Maps `objective` of a run to keys of scheduler_config.json that follow from it."""
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """Rules that a network satisfies if the pipeline computes its inputs as training does; each
    message names a difference."""
    modular: bool = False
    """Whether Diffusers opens and calls the pipeline as a modular one."""
    beside: Mapping[str, PartBeside] = field(default_factory=dict)
    """Components loaded from another repository, by the name of the component."""
    module: str = DIFFUSERS
    """Python module of the pipeline's class. If it is not Diffusers, the pipeline's folders may
    contain code."""

    def fixed(self, scheduler: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of `objective` that the pipeline's sampling loop determines, with their values.

        `scheduler` is the content of scheduler_config.json, from which `sampling` may compute a
        value.
        """
        said = self.sampling(scheduler)
        return {key: said.get(key, value) for key, value in self.objective.items()}

    def misfits(self, model: ModelConfig) -> list[str]:
        """Messages that say how the pipeline's inputs for `model` differ from those of training."""
        return [message for holds, message in self.rules(model) if not holds]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedSamples:
    """A batch of B samples padded with zeros to one length, for networks that take no packs."""

    latent_BCFHW: Tensor
    inputs: Mapping[str, Tensor]
    """Conditions by name: text states [B, L, E], or vectors [B, E]."""
    is_text_BL: Tensor | None
    """Mask of the main text, False on padding; None if all captions have the same length."""
    level_B: Tensor
    fps: float
    """Frame rate of the videos; NaN for pictures."""


def _told(guidance: float | None) -> dict[str, float]:
    """The guidance scale as an argument of Diffusers' network; empty without a scale."""
    return {} if guidance is None else {"guidance": guidance}


def own_names(table: NameTable) -> dict[str, str]:
    """Names of linears in Diffusers, each mapped to itself, for projects with the same names."""
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
    """What our code needs to know of Diffusers' counterpart of a family.

    Methods return messages about settings that do not fit, and raise only what their `Raises`
    lists.
    """

    class_name: str
    """Diffusers' class: the `_class_name` in config.json, which identifies the family of a
    folder."""
    module: str = DIFFUSERS
    """Python module of Diffusers' class."""
    table: NameTable
    """Diffusers' tensors for each of our tensors."""
    keys: ConfigKeys
    """Keys of config.json and the corresponding fields of our `model`."""
    inexpressible: Callable[[Any], list[str]] = lambda _: []
    """Maps a configuration to a message for each feature of our network that Diffusers' class
    lacks."""
    text_projection: FrozenTextProjection | None = None
    """Frozen projection of the text states; None if the family has none."""
    companion: Companion | None = None
    """Second network of the pipeline that ours may contain; None if there is none."""
    ignored: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of stored tensors that Diffusers' class does not read."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Maps patterns (`fnmatch`) of tensors that Diffusers' network lacks to the setting that adds
    them to ours. Such tensors start at zero."""
    beyond: Callable[[Any], str | None] = lambda _: None
    """Maps a configuration to a message about tensors of its export that Diffusers' class ignores,
    and about what reads them; None: there are none."""
    original_names: tuple[Mapping[str, str], ...] = ()
    """Diffusers' names of linears by their names in each original project; `*` is the number of a
    block. Several names with spaces between them are linears that the project fuses: each but the
    last has as many outputs as inputs. `~`: shift and scale are exchanged, for a linear that is not
    fused."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Diffusers' names of linears, in the form of `original_names`, by their names in published
    folders with other names."""
    single_file: SingleFile | None = None
    """The form of files of an original project; None: such files are not read."""
    comfyui_names: Callable[[Any], Mapping[str, str]] | None = None
    """Maps a configuration to those `original_names` that ComfyUI uses; None: ComfyUI reads
    Diffusers' names."""
    pipelines: Mapping[str, Pipeline]
    """Pipelines that run the family's networks, by class name."""
    refused_pipelines: Mapping[str, str] = field(default_factory=dict)
    """Maps pipelines that have the same config.json and tensors, but compute something else, to the
    feature that our network lacks."""
    largest_latent: Callable[[Any], tuple[int, int, int]] = lambda _: (2**20, 2**20, 2**20)
    """Maps a configuration to the largest latent (frames, rows, columns) that Diffusers' network
    takes; by default there is no limit."""
    call: Callable[[Any], str | None] = lambda _: None
    """Maps a configuration to Python code for model cards that computes `made` from `state` [1, C,
    F, H, W], `t`, `caption` [1, L, E] and `texts`; None: there is none."""
    run_network: Callable[..., Tensor]
    """Computes the output [C, F, H, W] from (Diffusers' network, `LatentSample`, timestep, our
    configuration). The timestep is the one that our network gets. For a network with a guidance
    embedding, the keyword `guidance` has the scale."""
    run_stacked: Callable[..., Tensor] | None = None
    """Computes outputs [B, C, F, H, W] from (Diffusers' network, `StackedSamples`, our
    configuration), to compare speeds. None: not supported. For a network with a guidance embedding,
    the keyword `guidance` has the scale."""

    def run(
        self,
        network: nn.Module,
        sample: LatentSample,
        level: float,
        model: ModelConfig,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """Output [C, F, H, W] of Diffusers' network for one sample.

        The timestep `level` and the scale `guidance` (`objective.guidance`) are as for our network.
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
        """Outputs [B, C, F, H, W] of Diffusers' network for a padded batch; needs `run_stacked`."""
        assert self.run_stacked is not None
        return self.run_stacked(network, samples, model, **_told(guidance))

    def companion_of(self, model: ModelConfig) -> Companion | None:
        """The companion, if the network of `model` contains it, else None."""
        return self.companion if self.companion and self.companion.is_part(model) else None

    def written_companion(self, model: ModelConfig) -> Companion | None:
        """The companion, if exports of `model` have it, else None."""
        second = self.companion_of(model)
        return None if second is None or second.frozen else second

    def is_written(self, pair: Pair, model: ModelConfig) -> bool:
        """Whether exports of `model` have the tensors of `pair`."""
        second = self.companion_of(model)
        return second is None or not second.frozen or not second.has(pair)

    def filled_network(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
        """Diffusers' network for the config.json `config`, in float32 and in evaluation mode.

        `weights` are converted to float32.

        Raises:
            ImportError: Diffusers is not installed.
            NotImplementedError: Diffusers has no such class.
        """
        network = self._class.from_config(dict(config))
        network.load_state_dict(dict(weights))
        return network.eval()

    @property
    def _class(self) -> Any:
        """Diffusers' class; raises what `open_network` raises."""
        import diffusers

        if not hasattr(diffusers, self.class_name):
            raise NotImplementedError(f"Diffusers {diffusers.__version__} has no {self.class_name}")
        return getattr(diffusers, self.class_name)

    def open_network(self, folder: Path, second: Path | None = None) -> nn.Module:
        """Diffusers' network of a folder, in float32.

        If `second` is the folder of the companion, the network has it as a child.

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
