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
    """A key of config.json, and the field of ours with the same meaning.

    If the two are not equal, `read` computes the field from all keys, and `write` the key from our
    network; with several fields `read` returns as many values. A key with neither field nor `write`
    is written as Diffusers' default.
    """

    name: str
    field: str | tuple[str, ...] | None = None
    default: Any = None
    """Diffusers' own."""
    type: Any = None
    """None: that of the default, whose numbers are positive."""
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    write_trained: Callable[[Any, int | None], Any] | None = None
    """`write`, of our network and the tokens of the longest pack that it was trained on."""
    written: Callable[[Any], bool] = lambda _: True
    """Whether an export has it; of a network."""

    def settings(self, t: Any) -> dict[str, Any]:
        """The fields of our network that the key determines; `t` has all keys."""
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
"""Frames, rows and columns; that the last two are equal is a rule of the family."""


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A field of ours that no key of Diffusers determines: an export stores it as a private key."""

    field: str
    type: Any
    published: Callable[[Any], Any] | None
    """Its value where we did not write the file, of all keys; None: the file does not tell it, so
    that the class of a pipeline must, or the user."""
    read: Callable[[Any], Any] = lambda value: value
    default: Any = ...
    """Value for exports that lack the key; by default all have it."""
    may_be_told: bool = False
    """Whether a user may say another value than that of published weights."""


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """config.json of one class, in both directions. Nothing in it raises for a user's mistakes."""

    keys: tuple[Key, ...]
    """In the order in which they are written."""
    kept: tuple[OwnKey, ...] = ()
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """What of the keys our network must have a counterpart for, and the words if it has none."""

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
        """Fields that a file which we did not write does not determine."""
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
    """A frozen first layer of text, whose outputs shards may hold instead (Cosmos 2.5)."""

    tensors: tuple[str, ...]
    """Diffusers' names of its weight [made, read] and others."""
    is_part: Callable[[Any], bool]
    """Whether a network has it."""
    added: Callable[[Any, int], ModelConfig]
    """(network of projected texts, numbers of a row before it) -> the network with it."""
    removed: Callable[[Any], ModelConfig]
    """The network with it -> that of projected texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBeside:
    """A part that a pipeline needs and its published folders lack."""

    kind: str
    """Its class in Transformers."""
    model: str
    """Hub name of the one that the networks were trained with."""
    has_weights: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """A second network of pipelines, which a setting makes a part of ours (Anima's conditioner)."""

    folder: str
    """Of its weights, in a pipeline or in the folder of a transformer alone; names of its tensors
    in the name table begin with it."""
    class_name: str
    module: str = DIFFUSERS
    """Where its class is."""
    field: str
    """Field of the family that says whether it is a part."""
    value: Any
    """Of that field, where it is."""
    instead: Any
    """Where shards hold what it makes."""
    keys: ConfigKeys
    """Of its config.json, of our whole network."""
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
    """Name of the objective that it samples."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the family that its networks have and config.json does not tell."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that its loop fixes, whatever its scheduler says."""
    of_few_steps: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` for networks that its index calls distilled to few steps."""
    sampling: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    """Where its loop fixes any: scheduler_config.json -> keys for the samplers."""
    scheduler: Callable[[Any], dict[str, Any]] = lambda _: {}
    """Likewise: objective -> keys of scheduler_config.json that are a run's."""
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """What of a network it feeds as in training, and the words if it does not."""
    modular: bool = False
    """Whether it is one of Diffusers' modular pipelines, which are opened and called otherwise."""
    beside: Mapping[str, PartBeside] = field(default_factory=dict)
    """By name: parts that are loaded from elsewhere."""
    module: str = DIFFUSERS
    """Where its class is; one that Diffusers lacks opens folders with code in them."""

    def fixed(self, scheduler: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of `objective` that the pipeline fixes in addition to its scheduler_config.json."""
        said = self.sampling(scheduler)
        return {key: said.get(key, value) for key, value in self.objective.items()}

    def misfits(self, model: ModelConfig) -> list[str]:
        """Inputs of the pipeline that differ from training, in words."""
        return [message for holds, message in self.rules(model) if not holds]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedSamples:
    """B samples side by side, shorter ones padded with zeros, as in loops without packs."""

    latent_BCFHW: Tensor
    inputs: Mapping[str, Tensor]
    """By name: [B, L, E] of a text, [B, E] of a vector."""
    is_text_BL: Tensor | None
    """False on padding of the main text; None where all captions have the same length."""
    level_B: Tensor
    fps: float
    """NaN for pictures."""


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
    """Diffusers' counterparts of a family's networks.

    Nothing in it raises for a user's mistakes.
    """

    class_name: str
    """`_class_name` of config.json, by which a folder is known to be of this family."""
    module: str = DIFFUSERS
    """Where its class is."""
    table: NameTable
    """Which tensors of theirs are which of ours."""
    keys: ConfigKeys
    """The keys of config.json, and what of our configuration says the same."""
    inexpressible: Callable[[Any], list[str]] = lambda _: []
    """What of a network of ours Diffusers' has no counterpart for, in words."""
    text_projection: FrozenTextProjection | None = None
    """None: no shards hold projected texts of the family."""
    companion: Companion | None = None
    """None: no other network of a pipeline is a part of ours."""
    ignored: tuple[str, ...] = ()
    """Patterns, as in `fnmatch`, of stored tensors that Diffusers' class does not read."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Likewise, of tensors of our networks that published folders lack, where they start at zero,
    and the setting that our networks have them by."""
    beyond: Callable[[Any], str | None] = lambda _: None
    """What an export has that Diffusers' class leaves out, what reads it, in words; None: none."""
    original_names: tuple[Mapping[str, str], ...] = ()
    """Tables of linears as the original projects name them -> as Diffusers does; `*`: a block.

    Several names with spaces between them are linears that the project has as one: each but the
    last has as many outputs as inputs. `~`: shift and scale have changed places, if alone."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Names of linears, as in `original_names`, that weights of published folders have, where they
    are not Diffusers'."""
    single_file: SingleFile | None = None
    """None: no files of an original project are read."""
    comfyui_names: Callable[[Any], Mapping[str, str]] | None = None
    """The one of `original_names` that ComfyUI has of a network; None: it reads Diffusers'."""
    pipelines: Mapping[str, Pipeline]
    """The pipelines that run these networks, by class."""
    refused_pipelines: Mapping[str, str] = field(default_factory=dict)
    """Those whose networks have the same config.json and tensors and compute something else; what
    they need."""
    largest_latent: Callable[[Any], tuple[int, int, int]] = lambda _: (2**20, 2**20, 2**20)
    """Latent frames, rows and columns that Diffusers' network takes at most; default: any."""
    call: Callable[[Any], str | None] = lambda _: None
    """Python for cards: `made`, from `state` [1, C, F, H, W], `t`, `caption` [1, L, E], `texts`."""
    run_network: Callable[..., Tensor]
    """(Diffusers' network, `LatentSample`, level that ours is told, configuration of ours) ->
    output [C, F, H, W]; networks with a guidance embedding have `guidance=`, its scale, too."""
    run_stacked: Callable[..., Tensor] | None = None
    """(network, `StackedSamples`, configuration), and `guidance=` likewise -> [B, C, F, H, W], by
    which speeds are compared."""

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
        """Outputs for samples side by side, [B, C, F, H, W]; the form must have `run_stacked`."""
        assert self.run_stacked is not None
        return self.run_stacked(network, samples, model, **_told(guidance))

    def companion_of(self, model: ModelConfig) -> Companion | None:
        """The second network, if it is a part of this one, else None."""
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
