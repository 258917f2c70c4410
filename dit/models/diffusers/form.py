"""Types that describe Diffusers' counterpart of a family's networks.

DiffusersForm  a class of Diffusers: tensor names, config.json, pipelines, and how it is called
ConfigKeys     the keys of its config.json, and the fields of our `model` with the same meaning
Pipeline       a pipeline that runs the class
Companion      a second network of a pipeline, which ours may contain
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
    """Base of Pydantic models of a JSON file: strict types, unknown keys are refused.

    1.0 is not accepted as an integer, 1 as a boolean, or NaN as a number.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class OpenKeys(StrictKeys):
    """Base of Pydantic models of a JSON file: strict types, unknown keys are in `model_extra`."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of Diffusers' config.json, and the field of our `model` with the same meaning.

    `read` computes the field from all keys, `write` the key from our configuration. They are needed
    only if key and field have different values. If `field` has several names, `read` returns a
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
    """Computes the key's value from (configuration, tokens of the longest pack in training, or None
    without data), instead of `write`."""
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
        """The value of the key in an export of `model`.

        `longest` is the number of tokens of the longest pack in training; None without data.
        """
        if self.write_trained is not None:
            return self.write_trained(model, longest)
        if self.write is not None:
            return self.write(model)
        return getattr(model, self.field) if isinstance(self.field, str) else self.default


def same(name: str, default: Any, **options: Any) -> Key:
    """The key `name` of config.json, whose field in our `model` has the same name and value."""
    return Key(name, name, default, **options)


def never(_: Any) -> bool:
    """Always False: the value of `Key.written` for keys that exports omit."""
    return False


def heads_of(width: int) -> Key:
    """The key `attention_head_dim`, the width of a head; `width` is Diffusers' default.

    Our field is `hidden_size`, the product with the key `num_attention_heads`.
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
"""The key `patch_size` of video networks: (frames, rows, columns). The family's rules must check
that rows and columns are equal."""


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A field of our `model` without a key in Diffusers' config.json; exports add a private key."""

    field: str
    type: Any
    published: Callable[[Any], Any] | None
    """Computes the field from all keys of a config.json that is not an export of ours. None: the
    file does not determine the field, so the pipeline's class or the user sets it."""
    read: Callable[[Any], Any] = lambda value: value
    default: Any = ...
    """Value of the field for older exports of ours, which lack the private key; `...` if all
    exports have the key."""
    may_be_told: bool = False
    """Whether a user may set the field for published weights even if `published` computes it."""


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Conversion between the config.json of a Diffusers class and our `model`, in both directions.

    A setting that does not fit is reported by `unsupported`, which returns messages.
    """

    keys: tuple[Key, ...]
    """Keys of config.json, in the order in which an export writes them."""
    kept: tuple[OwnKey, ...] = ()
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """Rules that a config.json must satisfy; the message of each names the feature that our network
    lacks."""

    @cached_property
    def file(self) -> type[BaseModel]:
        """The Pydantic model of config.json, with Diffusers' defaults.

        Unknown keys of a file are in `model_extra`.
        """
        fields: Any = {
            key.name: (key.type or _type_of(key.default), key.default) for key in self.keys
        }
        return create_model("Keys", __base__=OpenKeys, **fields)

    @cached_property
    def kept_file(self) -> type[BaseModel]:
        """The Pydantic model of the private keys that an export of ours adds to config.json."""
        fields: Any = {one.field: (one.type, one.default) for one in self.kept}
        return create_model("PrivateKeys", __base__=StrictKeys, **fields)

    def unsupported(self, t: Any) -> list[str]:
        """A message for each feature of the config.json `t` that our network lacks.

        Unknown keys have no messages.
        """
        return [message for holds, message in self.rules(t) if not holds]

    def settings(self, t: Any, kept: Any, told: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of our `model`, by name, from a config.json `t` and its private keys `kept`.

        `kept` is None if the file is not an export of ours. Only then the fields that the user has
        set, `told`, are used; they override the values of published weights.

        Raises:
            ValueError: a field does not accept its value.
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
        """The content of config.json for `model`, without private keys.

        `longest` is the number of tokens of the longest pack in training; None without data.
        """
        return {key.name: key.value(model, longest) for key in self.keys if key.written(model)}

    @property
    def untold(self) -> tuple[str, ...]:
        """Names of fields that a config.json determines only if it is an export of ours."""
        return tuple(one.field for one in self.kept if one.published is None)

    @property
    def tellable(self) -> tuple[str, ...]:
        """Names of fields that a user may set if the config.json is not an export of ours."""
        return tuple(one.field for one in self.kept if one.published is None or one.may_be_told)

    def told(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `tellable` that a user has set, with values converted by `OwnKey.read`.

        `given` maps names to the user's values; a field without a value, or with None, is not set.

        Raises:
            ValueError: a field does not accept its value.
        """
        reads = {one.field: one.read for one in self.kept if one.field in self.tellable}
        values = {key: given.get(key) for key in reads}
        return {
            key: _read(key, value, reads[key]) for key, value in values.items() if value is not None
        }

    def private(self, model: ModelConfig) -> dict[str, Any]:
        """The private keys that an export of `model` adds to config.json, with their values."""
        return {one.field: getattr(model, one.field) for one in self.kept}


def _read(key: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """The `value` that a user gives for the field `key`, converted by `read`."""
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
    """A frozen linear of text states; shards may store its outputs instead of its inputs."""

    tensors: tuple[str, ...]
    """Diffusers' names of the projection's tensors; the first is its weight [outputs, inputs]."""
    is_part: Callable[[Any], bool]
    """Whether the network of a configuration contains the projection."""
    added: Callable[[Any, int], ModelConfig]
    """Maps (configuration for shards with projected text, width before the projection) to the
    configuration of the network with the projection."""
    removed: Callable[[Any], ModelConfig]
    """Maps a configuration with the projection to the one for shards with projected text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBeside:
    """A component, such as a text encoder, that a pipeline's published folder does not contain."""

    kind: str
    """Class of the component in Transformers."""
    model: str
    """Hugging Face repository of the component with which the published networks were trained."""
    has_weights: bool
    """Whether the component has weights, unlike a tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """The second network of a pipeline, which ours may contain (Anima's conditioner)."""

    folder: str
    """Folder of the companion's weights, next to the transformer's folder; also the prefix of the
    companion's tensors in the name table."""
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
    """Keys of the companion's config.json, and the fields of our `model` that they set."""
    frozen: tuple[str, ...] = ()
    """Patterns of the companion's tensors that our network lacks. A companion with such tensors is
    not trained, and exports omit it: it is unchanged in the folder from which it was imported."""

    def is_part(self, model: ModelConfig) -> bool:
        return getattr(model, self.field) == self.value

    def has(self, pair: Pair) -> bool:
        """Whether the tensors of `pair` belong to the companion."""
        return pair.theirs[0].startswith(f"{self.folder}.")

    def content(self, model: ModelConfig) -> dict[str, Any]:
        """The content of the companion's config.json for our configuration `model`."""
        return {"_class_name": self.class_name, **self.keys.content(model)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleFile:
    """How to read the network from a single weights file of its original project.

    The file may also contain other components, such as a VAE.
    """

    renamed: Callable[[str], str | None]
    """Maps the name of a tensor in the file to Diffusers' name; None for tensors of other
    components."""
    config: Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any] | None]
    """Maps shapes of tensors, by Diffusers' names, to the content of config.json; None if they are
    shapes of another network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A pipeline of Diffusers: what its class and files determine about its networks."""

    samples: str = "flow"
    """`objective.name` of the networks that the pipeline can sample from."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `model` that are equal in all networks of the pipeline but not in config.json."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that the pipeline's sampling loop determines, with their values."""
    of_few_steps: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` for networks that model_index.json marks as distilled to few steps."""
    sampling: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    """Maps the content of scheduler_config.json to values that replace those in `objective`."""
    scheduler: Callable[[Any], dict[str, Any]] = lambda _: {}
    """Maps `objective` of a run to the keys of scheduler_config.json that it determines."""
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """Rules for `model` under which the pipeline computes the network's inputs as training does;
    the message of each names the difference."""
    modular: bool = False
    """Whether the pipeline is one of Diffusers' modular pipelines (`ModularPipeline`)."""
    beside: Mapping[str, PartBeside] = field(default_factory=dict)
    """Components that are loaded from another repository, by name."""
    module: str = DIFFUSERS
    """Python module of the pipeline's class. If it is not `diffusers`, the pipeline's folders may
    contain Python code."""

    def fixed(self, scheduler: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `objective` that the sampling loop determines, with their values.

        `sampling` may compute values from `scheduler`, the content of scheduler_config.json.
        """
        said = self.sampling(scheduler)
        return {key: said.get(key, value) for key, value in self.objective.items()}

    def misfits(self, model: ModelConfig) -> list[str]:
        """Messages that say how the pipeline's inputs for `model` differ from those of training."""
        return [message for holds, message in self.rules(model) if not holds]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedSamples:
    """A batch of B samples, padded with zeros to equal lengths, for networks that take no packs."""

    latent_BCFHW: Tensor
    inputs: Mapping[str, Tensor]
    """Conditions by name: text states [B, L, E], or vectors [B, E]."""
    is_text_BL: Tensor | None
    """Mask of the text `TEXT`, False on padding; None if all captions have the same length."""
    level_B: Tensor
    fps: float
    """Frame rate of the videos; NaN for pictures."""


def _told(guidance: float | None) -> dict[str, float]:
    """The keyword argument `guidance` of `run_network`; empty if `guidance` is None."""
    return {} if guidance is None else {"guidance": guidance}


def own_names(table: NameTable) -> dict[str, str]:
    """Maps the name of each linear in Diffusers to itself, for projects that use the same names."""
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
    """Describes the class of Diffusers that has the arithmetic of a family's network.

    Settings that do not fit are returned as messages, not raised.
    """

    class_name: str
    """Name of Diffusers' class: `_class_name` in config.json, by which a folder's family is
    found."""
    module: str = DIFFUSERS
    """Python module of Diffusers' class."""
    table: NameTable
    """Diffusers' tensors for each of our tensors."""
    keys: ConfigKeys
    """Keys of config.json and the corresponding fields of our `model`."""
    inexpressible: Callable[[Any], list[str]] = lambda _: []
    """Maps a configuration to messages, one for each feature of our network that Diffusers' class
    lacks."""
    text_projection: FrozenTextProjection | None = None
    """Frozen projection of the text states; None if the family has none."""
    companion: Companion | None = None
    """Second network of the pipeline, which ours may contain; None if there is none."""
    ignored: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of tensors in published files that Diffusers' class does not read."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Maps patterns (`fnmatch`) of Diffusers' names to a setting: tensors that only our network has
    if it is set. They start at zero."""
    beyond: Callable[[Any], str | None] = lambda _: None
    """Maps a configuration to a message about tensors of its export that Diffusers' class ignores
    and other programs read; None if there are none."""
    original_names: tuple[Mapping[str, str], ...] = ()
    """For each original project, maps its names of linears to Diffusers' names; `*` is the index of
    a block. If the project fuses several linears, their names are separated by spaces, and each but
    the last has as many outputs as inputs. `~` at the end of Diffusers' name: shift and scale are
    swapped; such a linear must not be fused."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Maps names of linears in published folders to Diffusers' names, if they differ; in the form
    of `original_names`."""
    single_file: SingleFile | None = None
    """How to read a single weights file of the original project; None: such files are not read."""
    comfyui_names: Callable[[Any], Mapping[str, str]] | None = None
    """Maps a configuration to the element of `original_names` that ComfyUI uses; None: ComfyUI
    reads Diffusers' names."""
    pipelines: Mapping[str, Pipeline]
    """Pipelines that run the family's networks, by class name."""
    refused_pipelines: Mapping[str, str] = field(default_factory=dict)
    """Maps names of pipelines that cannot be imported, because they compute something else with the
    same config.json and tensors, to the feature that our network lacks."""
    largest_latent: Callable[[Any], tuple[int, int, int]] = lambda _: (2**20, 2**20, 2**20)
    """Maps a configuration to the largest latent (frames, rows, columns) that Diffusers' network
    accepts; by default there is no limit."""
    call: Callable[[Any], str | None] = lambda _: None
    """Maps a configuration to a line of Python for model cards. The line calls Diffusers' `network`
    and computes `made` from `state` [1, C, F, H, W], `t`, `caption` [1, L, E] and `texts`. None:
    the card shows no call."""
    run_network: Callable[..., Tensor]
    """Computes the output [C, F, H, W] from (Diffusers' network, `LatentSample`, timestep of our
    network, our configuration). For a network with a guidance embedding, the keyword `guidance` is
    the scale."""
    run_stacked: Callable[..., Tensor] | None = None
    """Computes outputs [B, C, F, H, W] from (Diffusers' network, `StackedSamples`, our
    configuration), to compare speeds; None: not supported. For a network with a guidance embedding,
    the keyword `guidance` is the scale."""

    def run(
        self,
        network: nn.Module,
        sample: LatentSample,
        level: float,
        model: ModelConfig,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """The output [C, F, H, W] of Diffusers' network for one sample.

        The timestep `level` and the scale `guidance` (`objective.guidance`) are those that our
        network gets.
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
        """The outputs [B, C, F, H, W] of Diffusers' network for a padded batch.

        `run_stacked` must not be None.
        """
        assert self.run_stacked is not None
        return self.run_stacked(network, samples, model, **_told(guidance))

    def companion_of(self, model: ModelConfig) -> Companion | None:
        """The companion, if the network of `model` contains it, else None."""
        return self.companion if self.companion and self.companion.is_part(model) else None

    def written_companion(self, model: ModelConfig) -> Companion | None:
        """The companion, if exports of `model` contain it, else None."""
        second = self.companion_of(model)
        return None if second is None or second.frozen else second

    def is_written(self, pair: Pair, model: ModelConfig) -> bool:
        """Whether exports of `model` contain the tensors of `pair`."""
        second = self.companion_of(model)
        return second is None or not second.frozen or not second.has(pair)

    def filled_network(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
        """Diffusers' network with the given `config` and `weights`, in float32 and evaluation mode.

        `config` is the content of config.json.

        Raises:
            ImportError: Diffusers is not installed.
            NotImplementedError: Diffusers has no such class.
        """
        network = self._class.from_config(dict(config))
        network.load_state_dict(dict(weights))
        return network.eval()

    @property
    def _class(self) -> Any:
        """The class of Diffusers named `class_name`.

        Raises:
            ImportError: Diffusers is not installed.
            NotImplementedError: Diffusers has no such class.
        """
        import diffusers

        if not hasattr(diffusers, self.class_name):
            raise NotImplementedError(
                f"the installed Diffusers {diffusers.__version__} has no class {self.class_name};"
                " install a newer release (pip install --upgrade diffusers)"
            )
        return getattr(diffusers, self.class_name)

    def open_network(self, folder: Path, second: Path | None = None) -> nn.Module:
        """Diffusers' network from the weights in `folder`, in float32.

        If `second`, the folder of the companion, is given, the companion is a child module of the
        network.

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
