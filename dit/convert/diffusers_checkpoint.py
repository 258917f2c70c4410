"""A transformer's folder in Diffusers' format: config.json, safetensors (one or several), index."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from safetensors import SafetensorError, safe_open

from dit.convert.errors import ConvertError, check_shapes, listed
from dit.models.diffusers.form import Companion
from dit.models.diffusers.names import Pair
from dit.models.registry import NETWORKS as FAMILY_OF_CLASS
from dit.models.registry import families, family_named
from dit.parsing import parse_json
from dit.system_errors import explained

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OUR_KEY = "_megatron_dit"
"""Key of an export's config.json for settings that Diffusers lacks; Diffusers ignores the key."""

_Checked = TypeVar("_Checked", bound=BaseModel)


class PrivateKeys(BaseModel):
    """The private keys of a config.json, which begin with an underscore, that an import reads."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    use_default_values: list[str] = Field(default=[], alias="_use_default_values")
    ours: dict[str, Any] | None = Field(default=None, alias=OUR_KEY)


class WeightIndex(BaseModel):
    """Content of the index file of weights in several files."""

    model_config = ConfigDict(strict=True, extra="ignore")

    weight_map: dict[str, str]


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes `content` as JSON in Diffusers' formatting."""
    file.write_text(json.dumps(content, indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        ConvertError: the file cannot be read, or holds something else.
    """
    try:
        if not file.is_file():  # reading a pipe would wait for ever
            raise ValueError("it is not a file")
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConvertError(
            f"{file} cannot be read ({explained(error)}); restore it, or download it again"
        ) from error
    if not isinstance(content, dict):
        raise ConvertError(
            f"{file} holds a {type(content).__name__}, not a JSON object; download or export the"
            " folder again"
        )
    return content


def checked_json(
    kind: type[_Checked], content: dict[str, Any], *, place: object, within: str = ""
) -> _Checked:
    """The JSON object `content` of the file `place`, validated as a `kind`.

    `within` is the key of the file under which `content` lies, for messages; by default the whole
    file.

    Raises:
        ConvertError: names every key that is unknown or has a value of another type.
    """
    try:
        return kind.model_validate_json(
            json.dumps(content)
        )  # from JSON, so that a list is accepted for a tuple
    except ValidationError as error:
        wrong = "; ".join(_in_words(one, within) for one in error.errors(include_url=False))
        raise ConvertError(
            f"{place} cannot be imported: {wrong}. Download the folder again, or give another model"
        ) from error


def _in_words(error: ErrorDetails, within: str) -> str:
    key = ".".join(map(str, filter(None, (within, *error["loc"]))))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}, of another model or a newer version"
    if error["type"] == "missing":
        return f"{key} is missing"
    shown = json.dumps(error["input"], default=str)
    said = error["msg"].removeprefix("Input ")
    return f"{key}={shown if len(shown) <= 60 else f'{shown[:57]}...'} {said}"


CONFIG, SCHEDULER_CONFIG = "config.json", "scheduler_config.json"
SECOND = "transformer_2"
"""Folder of the second transformer of a pipeline with two transformers (Wan 2.2)."""
NETWORKS = ("transformer", SECOND)
"""Folders of the transformers in a pipeline."""
PIPELINE_INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
WEIGHTS = "diffusion_pytorch_model"
INDEX = f"{WEIGHTS}.safetensors.index.json"
_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name of a dtype in a safetensors file -> name in torch."""
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
"""8-bit dtypes of weights that have scales; weights times scales are read as bfloat16."""
_NF4 = ".quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True)
class Header:
    """File, shape and dtype of a tensor in a folder of Diffusers."""

    file: Path | None  # None: it is not stored, and stands for zeros
    shape: tuple[int, ...]
    kind: str  # its type, as the file calls it
    name: str = ""  # its name in the file, if it differs from Diffusers' name
    # Index of its first row in the stored tensor, if that one joins several linears.
    first: int | None = None
    scales: tuple[Path, str] | None = None  # file and name of the scales of its rows

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype in torch."""
        import torch  # imported late: reading the settings of a folder needs no torch

        return torch.bfloat16 if self.scales else getattr(torch, _TYPES[self.kind])

    def read(self, stored: str, part: tuple[slice, ...]) -> Tensor:
        """The slices `part` of the tensor, which the file calls `stored`.

        A tensor with scales is multiplied by them, in bfloat16.
        """
        rows, *others = part
        start, stop, _ = rows.indices(self.shape[0])
        first = self.first or 0
        rows = slice(first + start, first + stop)
        assert self.file is not None
        with safe_open(self.file, framework="pt") as file:
            values = file.get_slice(stored)[(rows, *others)]
        if self.scales is None:
            return values
        with safe_open(self.scales[0], framework="pt") as file:
            scale = file.get_tensor(self.scales[1]).float().flatten()
        scale = scale if len(scale) == 1 else scale[rows]
        return (values.float() * scale.view(-1, *[1] * (values.dim() - 1))).bfloat16()


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusersFolder:
    """A transformer in Diffusers' format, whose tensors can be read one by one."""

    path: Path  # of config.json and the weights
    config: dict[str, Any]
    scheduler: dict[str, Any] | None
    scheduler_file: Path
    pipeline: str | None  # class of the pipeline that the transformer lies in, if its index says it
    # Noise levels t of this transformer, if the pipeline has a second one for the others.
    level_range: tuple[float, float] | None
    # Whether the pipeline's index says that it was distilled, by a flag or by a list of levels.
    is_distilled: bool
    headers: dict[str, Header]  # by name of the tensor

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Reads the tensor `name`, or the slices `part` of it, into memory of its own.

        Raises:
            ConvertError: the file has become unreadable since it was opened.
        """
        # The file is opened for each tensor: pages of an open file count as memory of this process.
        header = self.headers[name]
        place, name = header.file, header.name or name
        if place is None:
            import torch

            zeros = torch.zeros(header.shape, dtype=header.dtype)
            return zeros if part is None else zeros[part]
        try:
            if header.scales is not None or header.first is not None:
                return header.read(name, part or (slice(None),))
            with safe_open(place, framework="pt") as file:
                if part is not None:
                    return file.get_slice(name)[part]
                return file.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise ConvertError(
                f"{place}: tensor {name} cannot be read ({explained(error)}); restore the file, or"
                " download it again"
            ) from error

    @property
    def of_few_steps(self) -> str:
        """A log line about weights that were distilled to few steps."""
        return (
            f"{self.path} was distilled to few steps, which plain tuning undoes: tune the network"
            " from which it was distilled (adapters of that one fit this one), or tune adapters"
            " beside a training adapter (lora.frozen_adapter=FILE, docs/distilled.md)"
        )

    @property
    def multiplied_out(self) -> str | None:
        """A log line about weights in 8-bit floats with scales; None if there are none."""
        scaled = sum(header.scales is not None for header in self.headers.values())
        if not scaled:
            return None
        return (
            f"{self.path} has {scaled} weights in 8-bit floats with scales, which are multiplied"
            " out to bfloat16 once; exports have them in bfloat16"
        )

    @property
    def files(self) -> list[str]:
        """Paths, relative to `path`, of the files with the network's weights and settings."""
        stored = {one.file for one in self.headers.values() if one.file is not None}
        stored |= {one.scales[0] for one in self.headers.values() if one.scales is not None}
        folders = {self.path, *(file.parent for file in stored)}
        beside = {folder / name for folder in folders for name in (CONFIG, INDEX)}
        paths = stored | {file for file in beside if file.is_file()}
        return sorted(os.path.relpath(file, self.path) for file in paths)

    @property
    def absent(self) -> list[str]:
        """Names of missing tensors that are filled with zeros (see `fill_up`)."""
        return [name for name, header in self.headers.items() if header.file is None]

    def companion_path(self, companion: Companion) -> Path | None:
        """Folder of the `companion` network, inside this folder or beside it in a pipeline.

        The result is None if no such folder has a config.json.
        """
        inside, beside = (at / companion.folder for at in (self.path, self.path.parent))
        places = [inside, beside] if self.path.name in NETWORKS else [inside]
        return next((place for place in places if (place / CONFIG).is_file()), None)

    def companion_config(self, companion: Companion) -> dict[str, Any] | None:
        """config.json of the `companion` network; None if there is none.

        Raises:
            ConvertError: the file cannot be read.
        """
        place = self.companion_path(companion)
        return None if place is None else read_json(place / CONFIG)

    def join(self, companion: Companion) -> None:
        """Adds the tensors of the `companion` network to `headers`, as the name table calls them.

        Frozen tensors of the companion are left out. Nothing is added if the companion has no
        folder.

        Raises:
            ConvertError: the folder of the companion is damaged.
        """
        place = self.companion_path(companion)
        own = {} if place is None else _headers(place)
        own = {
            n: one for n, one in own.items() if not any(fnmatchcase(n, x) for x in companion.frozen)
        }
        names = {f"{companion.folder}.{name}": replace(one, name=name) for name, one in own.items()}
        self.headers.update(names)

    def fill_up(self, wanted: list[Pair], *, added: Collection[str]) -> None:
        """Adds zeros for all tensors of `wanted` whose names match a pattern of `added`.

        If the folder has any of them, nothing is added, so that `check` reports the missing ones.
        """
        kind = next(iter(self.headers.values())).kind
        new = {
            name: Header(None, shape, kind)
            for pair in wanted
            for name, shape in pair.their_shapes.items()
            if any(fnmatchcase(name, one) for one in added)
        }
        if not new.keys() & self.headers.keys():
            self.headers.update(new)

    def check(self, wanted: list[Pair], *, ignored: Sequence[str] = ()) -> None:
        """Checks that the folder holds exactly the tensors of `wanted`, with their shapes.

        Other tensors may be present if their names match a pattern of `ignored`.

        Raises:
            ConvertError: lists the names that are missing, unexpected, or of another shape.
        """
        shapes = {name: shape for pair in wanted for name, shape in pair.their_shapes.items()}
        here = {name: header.shape for name, header in self.headers.items()}
        others = here.keys() - shapes.keys()
        extra = [n for n in others if not any(fnmatchcase(n, one) for one in ignored)]
        beyond = f"what {CONFIG} describes"
        check_shapes(here, shapes, extra=extra, place=self.path, beyond=beyond)


def is_diffusers_folder(path: Path) -> bool:
    """Whether `path` is a folder in which `open_folder` would find a transformer's config.json."""
    return any((place / CONFIG).is_file() for place in (path, path / "transformer"))


def open_folder(path: Path, *, option: str = "--hf-path") -> DiffusersFolder:
    """Opens the folder of a transformer, or of a pipeline that contains one.

    For some networks `path` may also be a file of the original project
    (`DiffusersForm.single_file`). `option` is the key or command-line option that set `path`.

    Raises:
        ConvertError: `path` is none of these, or a file is missing or damaged.
    """
    if path.is_file():
        return _open_file(path, option=option)
    inner = path / "transformer"
    pipeline = not (path / CONFIG).is_file() and (inner / CONFIG).is_file()
    place = inner if pipeline else path
    if path.name == SECOND and pipeline_index(path.parent).is_file():
        pipeline, path = True, path.parent
    if not (place / CONFIG).is_file():
        raise ConvertError(
            f"{option} {path} has neither {CONFIG} nor transformer/{CONFIG}; give a folder that"
            " save_pretrained of Diffusers wrote"
        )
    scheduler = (path / "scheduler" if pipeline else path) / SCHEDULER_CONFIG
    index = pipeline_index(path)
    about = read_json(index) if pipeline and index.exists() else {}
    told = about.get("_class_name")
    config, stored = read_json(place / CONFIG), _headers(place)
    headers = _renamed(_with_scales(stored), _stored_names(config))
    if any(header.scales is not None for header in headers.values()):
        config.pop("quantization_config", None)
    return DiffusersFolder(
        path=place,
        config=config,
        scheduler=read_json(scheduler) if scheduler.exists() else None,
        scheduler_file=scheduler,
        pipeline=None if told is None else str(told),
        level_range=level_range(about, index, second=place.name == SECOND),
        is_distilled=about.get("is_distilled") is True or bool(about.get("sample_sigmas")),
        headers=headers,
    )


def _open_file(path: Path, *, option: str) -> DiffusersFolder:
    stored = _of_file(path)
    for family in families():
        single = None if family.diffusers is None else family.diffusers().single_file
        if single is None:
            continue
        names = {name: single.renamed(name) for name in stored}
        headers = {
            theirs: replace(stored[name], name=name) for name, theirs in names.items() if theirs
        }
        config = single.config({name: one.shape for name, one in headers.items()})
        if config is not None:
            return DiffusersFolder(
                path=path.parent,
                config=config,
                scheduler=None,
                scheduler_file=path.parent / SCHEDULER_CONFIG,
                pipeline=None,
                level_range=None,
                is_distilled="distilled" in path.name,
                headers=_with_scales(headers),
            )
    raise ConvertError(
        f"{option} {path} has tensors of no network that can be read from a single file; give a"
        " folder that save_pretrained of Diffusers wrote"
    )


def _stored_names(config: Mapping[str, Any]) -> Mapping[str, str]:
    """`DiffusersForm.stored_names` of the family that the config.json `config` names."""
    family = FAMILY_OF_CLASS.get(str(config.get("_class_name")))
    form = None if family is None else family_named(family).diffusers
    return {} if form is None else form().stored_names


def _with_scales(found: Mapping[str, Header]) -> dict[str, Header]:
    """The tensors `found`, with each scale moved from its own entry into that of its 8-bit weight.

    Raises:
        ConvertError: a weight has neither one scale nor one for each row.
    """
    made = dict(found)
    for name, header in found.items():
        if header.kind not in _EIGHT_BITS:
            continue
        scales = made.pop(f"{name}_scale", None)
        counts = (1, header.shape[0]) if header.shape else (1,)
        if scales is None or scales.file is None or math.prod(scales.shape) not in counts:
            raise ConvertError(
                f"{header.file} has {name} of type {header.kind}, but no {name}_scale with a number"
                " for each of its rows: download the file again, or give the weights in bfloat16"
            )
        made[name] = replace(header, scales=(scales.file, f"{name}_scale"))
    return made


def _renamed(found: Mapping[str, Header], names: Mapping[str, str]) -> dict[str, Header]:
    """The tensors `found` under Diffusers' names, for folders that use other names.

    `names` maps a module's name in the folder to Diffusers' name, with `*` for the number of a
    layer. If a stored tensor joins several linears of Diffusers below one another, their names are
    separated by blanks, and each linear gets an entry with its own rows.
    """
    made: dict[str, Header] = {}
    for key, header in found.items():
        module, _, kind = key.rpartition(".")
        number = re.search(r"(?<=\.)\d+(?=\.)", module)
        at = "" if number is None else number.group()
        theirs = names.get(module if number is None else module.replace(f".{at}.", ".*.", 1))
        if theirs is None or not header.shape:
            made[key] = header
            continue
        modules, first = theirs.replace("*", at).split(), 0
        for index, one in enumerate(modules, 1):
            rows = header.shape[0] - first if index == len(modules) else header.shape[-1]
            begin = None if len(modules) == 1 else first
            shape = (rows, *header.shape[1:])
            made[f"{one}.{kind}"] = replace(header, shape=shape, name=key, first=begin)
            first += rows
    return made


def pipeline_index(folder: Path) -> Path:
    """Path of the index of a pipeline folder, or of a modular pipeline's if it has only that."""
    plain, modular = folder / PIPELINE_INDEX, folder / MODULAR_INDEX
    return plain if plain.is_file() or not modular.is_file() else modular


def level_range(
    index: Mapping[str, Any], place: Path, *, second: bool
) -> tuple[float, float] | None:
    """Lowest and highest noise level t of the first or `second` of a pipeline's transformers.

    The result is None if the pipeline has only one transformer. The second transformer has the
    levels below the boundary.

    Raises:
        ConvertError: the boundary in `index` is not a noise level.
    """
    # Converters have written a boundary for pipelines of a single transformer, too.
    boundary, parts = index.get("boundary_ratio"), index.get(SECOND)
    if boundary is None or not isinstance(parts, list) or None in parts:
        return None
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        raise ConvertError(
            f"{place} says boundary_ratio={boundary!r}, not a level between 0 and 1; download the"
            " file again"
        )
    return (0.0, boundary) if second else (boundary, 1.0)


def _headers(place: Path) -> dict[str, Header]:
    single, index = place / f"{WEIGHTS}.safetensors", place / INDEX
    if single.is_file():
        return _of_file(single)
    if not index.is_file():
        raise ConvertError(
            f"{place} has neither {single.name} nor {INDEX}; other formats (.bin, variants such as"
            " fp16) are not read: save the model again with save_pretrained"
        )
    told = checked_json(WeightIndex, read_json(index), place=index).weight_map
    if not told:
        raise ConvertError(f"{index} names no weights; download it or export it again")
    files = sorted(set(told.values()))
    if strange := [name for name in files if Path(name).name != name or name in ("", ".", "..")]:
        raise ConvertError(
            f"{index} names {listed(map(repr, strange))}; each must be the name of a file"
            " in the folder of the index: download the index again"
        )
    if lost := [name for name in files if not (place / name).is_file()]:
        raise ConvertError(
            f"{place} has no {listed(lost)}, which {INDEX} names; download what is missing"
        )
    found: dict[str, Header] = {}
    for name in files:
        inside = _of_file(place / name)
        here = {tensor for tensor, file in told.items() if file == name}
        if wrong := inside.keys() ^ here:
            raise ConvertError(
                f"{place / name} and {INDEX} disagree about {listed(wrong)}; download both again"
            )
        found |= inside
    return found


def _of_file(file: Path) -> dict[str, Header]:
    try:
        with safe_open(file, framework="numpy") as opened:
            names = list(opened.keys())
            if any(name.endswith(_NF4) for name in names):
                raise ConvertError(
                    f"{file} has weights in nf4, the 4-bit numbers of bitsandbytes, which are not"
                    " read: give the weights in 8-bit floats or in bfloat16"
                )
            found = {name: _header(file, name, opened.get_slice(name)) for name in names}
    except (SafetensorError, OSError) as error:
        raise ConvertError(
            f"{file} is damaged ({explained(error)}); download it or export it again"
        ) from error
    if not found:
        raise ConvertError(f"{file} holds no weights; download it or export it again")
    return found


def _header(file: Path, name: str, part: Any) -> Header:
    stored = part.get_dtype()
    if stored not in (*_TYPES, *_EIGHT_BITS):
        raise ConvertError(
            f"{file} has {name} of type {stored}; only {', '.join(_TYPES)} are read: give the"
            " weights in one of them"
        )
    return Header(file, tuple(part.get_shape()), stored)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Which tensors an export stores in which file."""

    files: list[str]
    pairs: list[list[Pair]]  # of each file
    total_bytes: int
    folder: str = ""  # of a second network, whose names in the name table begin with it

    def stored_name(self, tensor: str) -> str:
        """Name of `tensor` inside its file."""
        return tensor.removeprefix(f"{self.folder}.") if self.folder else tensor

    @property
    def weight_map(self) -> dict[str, str]:
        """Name of each tensor, as inside its file -> name of the file."""
        return {
            self.stored_name(name): file
            for file, members in zip(self.files, self.pairs, strict=True)
            for pair in members
            for name in pair.theirs
        }

    def index(self) -> str:
        """Content of the index file, which maps the name of each tensor to its file."""
        content = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.weight_map}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


def in_groups(sizes: list[int], *, most: int) -> list[range]:
    """Ranges of indices that divide `sizes` into consecutive groups of at most `most` bytes each.

    A size above `most` is a group of its own.
    """
    groups, start, held = [], 0, 0
    for at, size in enumerate(sizes):
        if held and held + size > most:
            groups.append(range(start, at))
            start, held = at, 0
        held += size
    return [*groups, range(start, len(sizes))]


def plan_files(
    pairs: list[Pair], sizes: list[int], *, max_shard_size: int, folder: str = ""
) -> FilePlan:
    """Plan of files for the tensors of `pairs`, with the file names of Diffusers.

    `sizes` are the bytes of each pair. A file has at most `max_shard_size` bytes, or a single
    larger pair. `folder` is as in FilePlan.
    """
    groups = in_groups(sizes, most=max_shard_size)
    count = len(groups)
    names = [f"{WEIGHTS}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return FilePlan(
        files=names if count > 1 else [f"{WEIGHTS}.safetensors"],
        pairs=[[pairs[i] for i in group] for group in groups],
        total_bytes=sum(sizes),
        folder=folder,
    )
