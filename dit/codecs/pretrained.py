"""Loads models of Diffusers and Transformers, from a folder or the hub, once in a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

from dit.codecs.dataset_card import CodecError
from dit.system_errors import explained

PRECISIONS = ("float32", "bfloat16", "float16")
_INDEX = "model_index.json"
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_MODEL, _SCALE = "model.safetensors", ".weight_scale"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineComponent:
    """A component of a Diffusers pipeline, such as its VAE: its class, its place, its device."""

    library: str  # diffusers, one of its modules, or transformers
    kind: str  # class name
    model: str  # hub name, perhaps with @REVISION, or folder of the whole pipeline
    subfolder: str
    cache: str | None = None  # folder for downloads; None for the one of the library
    precision: str | None = None  # None for a component without weights, such as a tokenizer
    device: str = "cpu"
    local_only: bool = False  # whether nothing may be downloaded
    option: str | None = None  # the option that names `model`, if this is not the pipeline

    @classmethod
    def of(cls, encoder: Any, library: str, kind: str, subfolder: str) -> Self:
        """The component of class `kind` in `subfolder` of the pipeline of `encoder`.

        `library` is the module of the class; `encoder` is a codec or text encoder.
        """
        return cls(
            library=library,
            kind=kind,
            model=encoder.model_name,
            subfolder=subfolder,
            cache=encoder.cache,
            local_only=encoder.local_only,
        )

    @property
    def is_of_diffusers(self) -> bool:
        return self.library.partition(".")[0] == "diffusers"

    @property
    def place(self) -> str:
        """The folder of the pipeline, or its hub name without the revision."""
        return self.model if Path(self.model).is_dir() else self.model.partition("@")[0]

    @property
    def download(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that control downloads and their cache."""
        local: dict[str, Any] = {"local_files_only": True} if self.local_only else {}
        if self.place != self.model:
            local["revision"] = self.model.partition("@")[2]
        return {"cache_dir": self.cache, **local}

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`: the component's folder, and those of `download`."""
        return {"subfolder": self.subfolder, **self.download}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLocation:
    """Where the models of a dataset card are now, if they have moved since the packing."""

    model: str | None = None  # hub name or folder; None for the one in the card
    cache: str | None = None  # Hugging Face cache, or the folder of the pipeline itself
    tokenizer_cache: str | None = None
    local_only: bool = False  # whether nothing may be downloaded

    def settings(self, *, subfolder: str) -> dict[str, Any]:
        """The settings of a dataset card that this location replaces, by their names.

        A `cache` that contains the folder `subfolder` is itself the folder of the pipeline, unless
        `model` is set; any other `cache` is a folder for downloads.
        """
        found: dict[str, Any] = {"local_only": self.local_only}
        model = self.model
        if self.cache and model is None and (Path(self.cache) / subfolder).is_dir():
            model = self.cache
        elif self.cache:
            found["cache"] = self.cache
        if model:
            found["model_name"] = model
        if self.tokenizer_cache:
            found["tokenizer_cache"] = self.tokenizer_cache
        return found


def _class_of(part: PipelineComponent) -> Any:
    return published(f"{part.library}:{part.kind}")


def published(place: str) -> Any:
    """Imports a class or function of Diffusers or Transformers: `place` is `package.module:name`.

    Raises:
        CodecError: the package is not installed, or its version lacks the class or function.
    """
    package, name = place.partition(":")[0].partition(".")[0], place.partition(":")[2]
    try:
        return resolve_name(place)
    except (ImportError, AttributeError) as error:
        lacks = f"{name} needs the package {package}"
        if find_spec(package) is not None:
            lacks = f"{package} {version(package)} has no {name} ({error})"
        raise CodecError(f"{lacks}; install it with pip install 'megatron-dit[prep]'") from None


def _unusable(part: PipelineComponent, error: Exception) -> CodecError:
    remedy = "name a folder or a hub model in the layout of Diffusers"
    if not Path(part.place).is_dir():
        remedy = (
            f"there is no folder {part.place} here, so it was searched for on huggingface.co;"
            " correct the path, or download it on a machine with internet (docs/eight_gpus.md)"
        )
    elif part.option:
        remedy = "name a folder or a hub model in the layout of Transformers"
    if part.option:
        place = f"{part.option} {part.model} cannot be loaded as {part.kind}"
    else:
        place = f"--model_name {part.model}: {part.subfolder}/ cannot be loaded as {part.kind}"
    return CodecError(f"{place} ({error}); {remedy}")


@lru_cache
def model_config_of(part: PipelineComponent) -> Any:
    """Reads the configuration of a component, without its weights; the result is cached.

    Returns a dict for Diffusers, and a configuration object for Transformers.

    Raises:
        CodecError: there is no configuration, or it belongs to another class of Diffusers.
    """
    kind = _class_of(part)
    try:
        if not part.is_of_diffusers:
            return kind.config_class.from_pretrained(part.place, **part.where)
        config: Any = kind.load_config(part.place, **part.where)
    except (OSError, ValueError) as error:
        raise _unusable(part, error) from None
    # Diffusers loads another class without an error, and leaves what is missing at random values.
    if (found := config.get("_class_name", part.kind)) != part.kind:
        raise CodecError(
            f"--model_name {part.model}: {part.subfolder}/ is of class {found}, but the processor"
            f" needs {part.kind}; give the --processor of this model, or the --model_name of"
            " another one"
        )
    return config


def _index_of(part: PipelineComponent) -> dict[str, Any]:
    """Reads model_index.json of the pipeline that has the component.

    Raises:
        CodecError: the file cannot be read.
    """
    try:
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        found: Any = DiffusionPipeline.load_config(part.place, **part.download)
    except (OSError, ValueError) as error:
        raise CodecError(
            f"--model_name {part.model}: {_INDEX} cannot be read ({explained(error)});"
            " download it again, or give another folder"
        ) from None
    return found


@lru_cache
def stored_class(part: PipelineComponent, known: tuple[str, ...]) -> str:
    """The class name in the config.json of a component of Diffusers, which must be one of `known`.

    Raises:
        CodecError: there is no config.json, or it names another class.
    """
    try:
        config: Any = _class_of(part).load_config(part.place, **part.where)
    except (OSError, ValueError) as error:
        raise _unusable(part, error) from None
    if (found := config.get("_class_name")) not in known:
        raise CodecError(
            f"--model_name {part.model}: {part.subfolder}/ is of class {found}, but the processor"
            f" needs {' or '.join(known)}; give the pipeline of this processor"
        )
    return found


@lru_cache
def has_component(part: PipelineComponent) -> bool:
    """Whether the pipeline has the component, by its model_index.json.

    For a local folder without this file: whether the component's subfolder exists.

    Raises:
        CodecError: model_index.json cannot be read.
    """
    folder = Path(part.place)
    if folder.is_dir() and not (folder / _INDEX).exists():
        return (folder / part.subfolder).is_dir()
    return any(_index_of(part).get(part.subfolder, ()))  # [null, null] where there is none


@lru_cache
def pipeline_class(part: PipelineComponent) -> str | None:
    """The class name in model_index.json of the pipeline that has the component.

    The result is None if a local folder has no such file, or if the file names no class.

    Raises:
        CodecError: the index cannot be read.
    """
    folder = Path(part.place)
    if folder.is_dir() and not (folder / _INDEX).exists():
        return None
    return _index_of(part).get("_class_name")


@lru_cache
def tensors_of(part: PipelineComponent, names: tuple[str, ...]) -> dict[str, Any]:
    """Reads the tensors `names` of a component's weights, and no others, and returns them by name.

    Raises:
        CodecError: the file is missing, or lacks a tensor.
    """
    if not names:
        return {}
    from huggingface_hub import hf_hub_download
    from safetensors import SafetensorError, safe_open

    name, folder = f"{part.subfolder}/{_WEIGHTS}", Path(part.place)
    try:
        file = (
            folder / name if folder.is_dir() else hf_hub_download(part.place, name, **part.download)
        )
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except (OSError, ValueError, SafetensorError) as error:
        raise _unusable(part, error) from None


_visitors: dict[str, list[Any]] = {}
"""The networks that `visits` has moved to a device, by device."""


@contextmanager
def visits(device: str) -> Iterator[None]:
    """A context in which networks stay in host memory until `load` moves them to `device`.

    When the context ends, the networks return to host memory. This frees GPU memory, and the
    networks need not be read from disk again.
    """
    import torch

    visitors = _visitors[device] = []
    try:
        yield
    finally:
        del _visitors[device]
        with torch.inference_mode(False):
            for network in visitors:
                network.to("cpu")


def load(part: PipelineComponent) -> Any:
    """Loads a component, or returns the one that this process loaded before.

    A network is in evaluation mode, on `part.device`, and its weights require no gradients.

    Raises:
        CodecError: the component cannot be loaded.
    """
    import torch

    # Weights that are loaded in inference mode, while other networks compute, could not be moved.
    with torch.inference_mode(False):
        if part.precision is None or part.device not in _visitors:
            return _loaded(part)
        network, visitors = _loaded(replace(part, device="cpu")), _visitors[part.device]
        if network not in visitors:
            visitors.append(network)
        return network.to(part.device)


@lru_cache
def _loaded(part: PipelineComponent) -> Any:
    import torch

    kind = _class_of(part)
    try:
        if part.precision is None:
            return kind.from_pretrained(part.place, **part.where)
        dtype = getattr(torch, part.precision)
        if part.is_of_diffusers:
            model = kind.from_pretrained(part.place, **part.where, torch_dtype=dtype)
        else:
            told = {"dtype": dtype, "output_loading_info": True}
            model, info = kind.from_pretrained(part.place, **part.where, **told)
            _multiply_out(model, info["unexpected_keys"], part)
    except (OSError, ValueError, ImportError) as error:  # some processors need other packages
        raise _unusable(part, error) from None
    _tie(model)
    return model.requires_grad_(False).eval().to(part.device)


def _multiply_out(model: Any, unexpected: Iterable[str], part: PipelineComponent) -> None:
    """Multiplies 8-bit weights of `model`, in place, by the scale of each row.

    Transformers loads these weights unscaled and lists the scales among the `unexpected` tensors.
    The scales are read from the files of the component `part`.

    Raises:
        CodecError: a scale belongs to no weight.
    """
    import torch
    from safetensors import safe_open

    scales = [name for name in unexpected if name.endswith(_SCALE)]
    if not scales:
        return
    weights, found = dict(model.named_parameters()), set[str]()
    for file in _files_of(part):
        with safe_open(file, "pt") as opened, torch.no_grad():
            for name in {*scales} & {*opened.keys()}:
                module = name.removesuffix(_SCALE)
                weight = weights.get(f"{module}.weight")
                if weight is None:
                    continue
                scale = opened.get_tensor(name).float().flatten()
                weight.copy_(weight.float() * scale.view(-1, *[1] * (weight.dim() - 1)))
                found.add(name)
    if lost := sorted({*scales} - found):
        raise CodecError(
            f"--model_name {part.model}: {part.subfolder}/ has 8-bit weights whose scales, such as"
            f" {lost[0]}, belong to no weight of {part.kind}; give a model in bfloat16"
        )


def _files_of(part: PipelineComponent) -> list[str]:
    """Paths of the safetensors files of a component of Transformers."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    single = cached_file(
        part.place, _MODEL, **part.where, _raise_exceptions_for_missing_entries=False
    )
    if single is not None:
        return [single]
    index: Any = cached_file(part.place, f"{_MODEL}.index.json", **part.where)
    files, _ = get_checkpoint_shard_files(part.place, index, **part.where)
    return [*(files or ())]


@lru_cache
def weights_checksum(part: PipelineComponent) -> str:
    """Returns a checksum of the weights of a component of Transformers, 16 hexadecimal digits.

    It is taken of the name, shape, dtype and first row of each tensor, so it reads megabytes of
    many gigabytes, and does not depend on how the tensors are spread over files. Fine-tuning
    changes it.

    Raises:
        CodecError: a file is missing or damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    found = dict[str, bytes]()
    try:
        for file in _files_of(part):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 # it is no dict
                    tensor = opened.get_slice(name)
                    shape, dtype = tensor.get_shape(), tensor.get_dtype()
                    row = tensor[:1] if shape else opened.get_tensor(name)
                    content = row.reshape(-1).view(torch.uint8).numpy().tobytes()
                    found[name] = f"{name} {shape} {dtype} ".encode() + content
    except (OSError, ValueError, SafetensorError) as error:
        raise _unusable(part, error) from None
    return sha256(b"".join(found[name] for name in sorted(found))).hexdigest()[:16]


def forget() -> None:
    """Forgets all components that `load` has loaded, so that their memory can be freed."""
    _loaded.cache_clear()


def _tie(model: Any) -> None:
    """Makes the encoder of a T5 model use the model's token embedding `shared`.

    Other models are unchanged.

    Published files hold the embedding only as `shared`, and Transformers 5 leaves the encoder's own
    copy random, without a warning.
    """
    shared, encoder = getattr(model, "shared", None), getattr(model, "encoder", None)
    if shared is not None and encoder is not None and hasattr(encoder, "embed_tokens"):
        encoder.embed_tokens.weight = shared.weight
