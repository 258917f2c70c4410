"""Folders of the configured datasets, checked before they are read.

A dataset is a folder with shards and `.nv-meta`, a blend of such folders, or an Energon metadataset
YAML. Each consists of leaves: pairs of a folder and a split.
"""

# L rows of a text, E width of an input

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

import safetensors.torch
import torch
from megatron.energon import traverse_metadataset
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml
from megatron.energon.flavors import EmptyDatasetError
from megatron.energon.flavors.webdataset import WebdatasetMeta
from megatron.energon.flavors.webdataset.structs import ShardInfo
from torch import Tensor

from dit.batch import TEXT
from dit.config import DatasetConfig, RunConfig
from dit.data.rejections import DataError
from dit.models.family import InputKind, NullInput, SampleInput
from dit.models.registry import family_of
from dit.parsing import cause
from dit.stored_samples import UnusableError, mlperf_nulls, tars_of_mlperf
from dit.token_ids import are_ids

META = ".nv-meta"
NULL_TEXT = "null_text.safetensors"
_RANGE, _MANY_NAMES = re.compile(r"\{(-?\d{1,99})\.\.(-?\d{1,99})"), 10**6
_CRUDE = {"CrudeWebdataset"}
_METADATASETS = {"Metadataset", "MetadatasetV2"}
_CLASS_KEYS = ("__module__", "__class__")
_FUNCTION_KEYS = ("part_filter", "sample_loader")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSplit:
    """One split of a dataset folder."""

    path: EPath
    split: str

    @property
    def name(self) -> str:
        return self.path.name


def train_leaves(dataset: DatasetConfig) -> tuple[DatasetSplit, ...]:
    """The folders and splits that training reads; none for mock data.

    Raises:
        DataError: a path is missing, is not a prepared dataset, or lacks the split.
    """
    return _leaves(dataset, split="train")


def val_leaves(dataset: DatasetConfig) -> tuple[DatasetSplit, ...]:
    """The folders and splits that validation reads; none for mock data.

    The split is `val`, or `train` with `dataset.use_train_split_for_val`.

    Raises:
        DataError: a path is missing, is not a prepared dataset, or lacks the split; the message
            about a missing `val` split says what to do.
    """
    return _leaves(dataset, split=val_split(dataset))


def val_split(dataset: DatasetConfig) -> str:
    return "train" if dataset.use_train_split_for_val else "val"


def data_paths(dataset: DatasetConfig) -> list[str]:
    """Paths in `dataset.blend`, or else that in `dataset.path`; empty if neither is set."""
    data = dataset
    return [entry.path for entry in data.blend] or ([data.path] if data.path else [])


def energon_source(dataset: DatasetConfig, *, split: str) -> str | dict[str, Any]:
    """The `path` argument of Energon's loaders for `split`; a blend is a metadataset in memory."""
    if not dataset.blend:
        assert dataset.path is not None
        return dataset.path
    entries = [{"weight": entry.weight, "path": str(EPath(entry.path))} for entry in dataset.blend]
    return {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {split: {"blend": entries}},
    }


def count_samples(leaf: DatasetSplit) -> int:
    """Number of samples in one split of a folder, from its index.

    Raises:
        DataError: there is no such split, it is empty, or `.nv-meta` is damaged.
    """
    count = sum(shard.count for shard in shards_of(leaf))
    if count == 0:
        raise DataError(_no_split(leaf))
    return count


def shards_of(leaf: DatasetSplit) -> list[ShardInfo]:
    """The shards of one split of a folder; empty if there is no such split.

    Raises:
        DataError: `.nv-meta` is damaged.
    """
    try:
        _check_ranges(leaf.path / META)
        shards = WebdatasetMeta.from_config(leaf.path, split_part=leaf.split).shards
        wrong = [shard.name for shard in shards if shard.count < 0]
    except (AssertionError, EmptyDatasetError):
        return []
    except KeyError as error:
        raise DataError(
            f"{leaf.path / META}: split.yaml names {error}, which .info.json does not list;"
            f" {_how(leaf)}"
        ) from error
    except Exception as error:  # of many kinds: Energon's parsers raise what they like
        raise DataError(
            f"{leaf.path / META} cannot be read ({cause(error)}); {_how(leaf)}"
        ) from error
    if wrong:
        raise DataError(
            f"{leaf.path / META}/.info.json says that {wrong[0]} has fewer than 0 samples;"
            f" {_how(leaf)}"
        )
    return shards


def _check_ranges(meta: EPath) -> None:
    """Checks that no pattern of shard names in the folder `meta` expands to too many names.

    Energon expands every pattern: one wrong digit would fill the memory.

    Raises:
        ValueError: a pattern such as {000000..000009} has too many names.
    """
    for path in (meta / "split.yaml", meta / "split.json"):
        if path.is_file():
            text = path.read_bytes().decode(errors="replace")
            many = [r for r in _RANGE.finditer(text) if abs(int(r[2]) - int(r[1])) >= _MANY_NAMES]
            if many:
                raise ValueError(
                    f"{path} has the pattern {many[0][0]}}}, which gives more than {_MANY_NAMES}"
                    " names; correct its bounds"
                )


def key_prefixes(leaves: tuple[DatasetSplit, ...]) -> dict[str, str]:
    """Path of each dataset of a blend -> the prefix that makes its keys unique in the blend.

    A folder that occurs twice in the blend is one dataset. A single dataset has no prefix.
    """
    if len(leaves) < 2:
        return {}
    folders = {str(leaf.path): (index, leaf.name) for index, leaf in enumerate(leaves)}
    names = [name for _, name in folders.values()]
    return {
        path: name if names.count(name) == 1 else f"{name}-{index}"
        for path, (index, name) in folders.items()
    }


def dataset_sizes(dataset: DatasetConfig) -> dict[str, int]:
    """Prefix of keys -> number of samples, for each dataset that training reads.

    A single dataset has the prefix "". Mock data have no entry.
    """
    leaves = train_leaves(dataset)
    prefixes = key_prefixes(leaves)
    return {prefixes.get(str(leaf.path), ""): count_samples(leaf) for leaf in leaves}


def null_inputs(config: RunConfig, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Name -> float32 tensor of each input that replaces a sample's own if its caption is dropped.

    A text is [L, E], a vector [E]. The tensors are the encoders' outputs for an empty caption, from
    `null_text.safetensors` or from the files of MLPerf's converter. If no dataset has such files,
    a text is one row of zeros, and a vector is zeros. An input with `NullInput.EMPTY`, or an
    optional one that the file lacks, has no rows ([0, E]) as a text, and is zeros [E] as a vector.
    Inputs that a sample always keeps (`NullInput.KEPT`) are absent from the result.

    If the family has an input of kind NULL_TEXT, datasets without the file are passed over: their
    samples are assumed to have their own null text.

    Raises:
        DataError: the datasets of a blend disagree, or an input is missing or has another shape.
    """
    inputs = family_of(config.model).inputs(config.model)
    leaves = train_leaves(config.dataset)
    if any(one.kind is InputKind.NULL_TEXT for one in inputs):
        leaves = tuple(leaf for leaf in leaves if (leaf.path / NULL_TEXT).is_file())
    found = [_null_inputs(leaf, inputs) for leaf in leaves] or [_null_inputs(None, inputs)]
    for leaf, null in zip(leaves, found, strict=False):
        for name, value in null.items():
            if not torch.equal(value, found[0][name]):
                raise DataError(
                    f"{NULL_TEXT} of {leaf.path} differs from that of {leaves[0].path} in"
                    f" `{name}`{_without_null(leaf, leaves[0])}; pack all datasets of a blend with"
                    " the same text encoder"
                )
    return {name: value.to(device) for name, value in found[0].items()}


def _without_null(*leaves: DatasetSplit) -> str:
    """Note for messages on the first of `leaves` without null_text.safetensors; else empty."""
    lacking = [f"{leaf.path}" for leaf in leaves if not (leaf.path / NULL_TEXT).is_file()]
    return f" ({lacking[0]} has no such file, which means a zero vector)" if lacking else ""


def _null_inputs(leaf: DatasetSplit | None, inputs: Sequence[SampleInput]) -> dict[str, Tensor]:
    stored = None if leaf is None else _stored_null_inputs(leaf)
    found = {}
    for one in inputs:
        if one.kind not in (InputKind.TEXT, InputKind.VECTOR) or one.null is NullInput.KEPT:
            continue
        is_vector = one.kind is InputKind.VECTOR
        lacks = stored is not None and one.name not in stored and not one.required
        if one.null is NullInput.EMPTY or lacks:
            found[one.name] = torch.zeros(one.width) if is_vector else torch.zeros(0, one.width)
        elif stored is None:
            found[one.name] = torch.zeros(one.width) if is_vector else torch.zeros(1, one.width)
        else:
            assert leaf is not None
            found[one.name] = _checked_null(stored, one, leaf)
    return found


def _stored_null_inputs(leaf: DatasetSplit) -> dict[str, Tensor] | None:
    path = leaf.path / NULL_TEXT
    if not path.is_file():
        if not tars_of_mlperf(shard.path for shard in shards_of(leaf)):
            return None
        try:
            return mlperf_nulls(lambda name: leaf.path / name)
        except UnusableError as error:
            raise DataError(str(error)) from error
    try:
        return safetensors.torch.load(path.read_bytes())
    except Exception as error:
        raise DataError(f"{path} cannot be read ({cause(error)}); {_how(leaf)}") from error


def _checked_null(stored: Mapping[str, Tensor], one: SampleInput, leaf: DatasetSplit) -> Tensor:
    """The null input `one` in `stored`, checked, float32: [E] for a vector, [L, E] for a text."""
    name, path, how = one.name, leaf.path / NULL_TEXT, _how(leaf)
    if name not in stored:
        raise DataError(f"{path} has {', '.join(sorted(stored))}, but no `{name}`; {how}")
    value = stored[name]
    if not value.is_floating_point() or not value.isfinite().all():
        raise DataError(
            f"{path}: {name} ({value.dtype}) must hold floats without NaN and Inf; {how}"
        )
    axes = 1 if one.kind is InputKind.VECTOR else 2
    empty = value.numel() == 0 and not one.may_be_empty  # ByT5 has no rows of an empty caption
    if value.dim() != axes or empty or value.shape[-1] != one.width:
        wanted = f"[{one.width}]" if axes == 1 else f"[any, {one.width}]"
        key = "model.crossattn_emb_size" if name == TEXT else "the family's width"
        remedy = f"set {key} to the text encoder's width" if name == TEXT else how
        raise DataError(
            f"{path}: {name} has shape {list(value.shape)}, but {key}={one.width} needs {wanted};"
            f" {remedy}"
        )
    if one.vocabulary is not None and not are_ids(value, vocabulary=one.vocabulary):
        raise DataError(
            f"{path}: {name} has token ids that are not whole numbers from 0 to"
            f" {one.vocabulary - 1}; {how}"
        )
    return value.float()


def _leaves(dataset: DatasetConfig, *, split: str) -> tuple[DatasetSplit, ...]:
    if dataset.mock:
        return ()
    paths = [entry.path for entry in dataset.blend] or [dataset.path]
    if paths == [None]:
        raise DataError("the run has no data: set dataset.path or dataset.blend, or use --mock")
    leaves = tuple(leaf for path in paths for leaf in _expand(EPath(str(path)), split))
    for leaf in leaves:
        count_samples(leaf)
    return leaves


def _expand(path: EPath, split: str) -> Iterator[DatasetSplit]:
    if path.is_file():
        list(metadataset_files(path))
        try:
            found = list(traverse_metadataset(path, split_part=split))
        except KeyError as error:
            raise DataError(_no_split(DatasetSplit(path=path, split=split))) from error
        except Exception as error:  # of many kinds, as above
            raise DataError(
                f"metadataset {path} cannot be read ({cause(error)}); correct the file"
            ) from error
        for reference in found:
            check_folder(reference.path)
            yield DatasetSplit(path=reference.path, split=reference.split_part)
    else:
        check_folder(path)
        yield DatasetSplit(path=path, split=split)


def check_folder(path: EPath) -> None:
    """Raises DataError if `path` is not a prepared dataset that can be read from this machine."""
    how = _prepare(path)
    if not path.is_dir() and not (path / META / ".info.json").is_file():
        raise DataError(f"dataset {path} does not exist; correct the path, or {how}")
    known = [(path / META / name).is_file() for name in (".info.json", ".info.yaml")]
    if not any(known) and _is_mlperf_folder(path):
        linked = f"{quote(str(path))} --link --output_dir {quote(f'{path}-linked')}"
        raise DataError(
            f"{path} has no {META}/.info.json, but shards of MLPerf's FLUX.1: prepare them in"
            f" a folder of their own with `python -m data_prep convert {linked}`"
        )
    if not any(known):
        raise DataError(f"{path} has no {META}/.info.json: it is not a prepared dataset; {how}")
    settings = path / META / "dataset.yaml"
    if not settings.is_file():
        raise DataError(f"{settings} is missing; {how}")
    _check_class(_read_yaml(settings), settings, allowed=_CRUDE)


def _is_mlperf_folder(path: EPath) -> bool:
    """Whether NVIDIA's converter for MLPerf wrote the folder `path`, or folders of splits in it."""
    return any((path / name / "index.txt").is_file() for name in ("", "train", "val"))


def _read_yaml(path: EPath) -> Any:
    try:
        document = load_yaml(path.read_bytes())
        json.dumps(document, default=str)  # fails for a document that contains itself
    except Exception as error:  # of many kinds: the parser is written in C++
        raise DataError(
            f"{path} cannot be read as YAML ({cause(error)}); correct or restore it"
        ) from error
    return document


def metadataset_files(path: EPath, *, outer: tuple[str, ...] = ()) -> Iterator[EPath]:
    """Yields the path of a metadataset, then those of all files that it names.

    These are other metadatasets, whose files follow too, and files of dataset settings. `outer` are
    the paths of the metadatasets in which this one is nested, to find one that contains itself.

    Raises:
        DataError: a file cannot be read, names code to run or contains itself. It is raised only
            when the iteration comes to this file.
    """
    if str(path) in outer:
        way = " -> ".join(outer)
        raise DataError(f"metadataset {path} refers to itself, by {way}; remove that path from it")
    if not path.name.endswith(".yaml"):
        raise DataError(
            f"dataset {path} is a file; give a folder with {META}, or an Energon metadataset .yaml"
        )
    document = _read_yaml(path)
    _check_class(document, path, allowed=_METADATASETS)
    yield path
    for node in _mappings_in(document):
        name = node.get("path")
        if not isinstance(name, str):
            continue
        if name.startswith("~"):
            home = os.path.expanduser(name)
            raise DataError(
                f"{path} has the path {name}, and Energon does not expand ~; write {home}"
            )
        _check_shares(node, path)
        inner = path.parent / name
        if inner.is_file():
            yield from metadataset_files(inner, outer=(*outer, str(path)))
        yield from _settings_files(node, inner)


def _check_shares(node: dict[Any, Any], path: EPath) -> None:
    for key in ("weight", "repetitions"):
        share = node.get(key, 1)
        if isinstance(share, int | float) and not share > 0:
            raise DataError(
                f"{path}: {key} of {node['path']} is {share}, but must be above 0; to train without"
                " this dataset, remove it from the file"
            )


def _settings_files(node: dict[Any, Any], folder: EPath) -> Iterator[EPath]:
    """Yields files that an entry of a metadataset names in place of dataset.yaml and split.yaml.

    `node` is the entry, and `folder` its dataset.

    Raises:
        DataError: the file in place of dataset.yaml names code, or a class that is not Energon's.
    """
    for key in ("dataset_config", "split_config"):
        if isinstance(name := node.get(key), str):
            file = folder / META / name
            if key == "dataset_config" and file.is_file():
                _check_class(_read_yaml(file), file, allowed=_CRUDE)
            yield file


def _mappings_in(node: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _mappings_in(child)


def _check_class(document: Any, path: EPath, *, allowed: set[str]) -> None:
    """Refuses YAML that names code, because Energon would import and call it.

    Raises:
        DataError: the file names another module or class than the `allowed` ones, or a function.
    """
    if not isinstance(document, dict):
        raise DataError(f"{path} holds no mapping of settings; {_prepare(path.parent.parent)}")
    module = document.get("__module__", "megatron.energon")
    name = document.get("__class__", min(allowed))
    if module != "megatron.energon" or name not in sorted(allowed):  # a name may be a list
        raise DataError(
            f"{path} names the class {module}.{name}; name megatron.energon and"
            f" {' or '.join(sorted(allowed))} as __module__ and __class__"
            " (`energon prepare --sample-type CrudeWebdataset` writes such settings of shards)"
        )
    for node in _mappings_in({k: v for k, v in document.items() if k not in _CLASS_KEYS}):
        for key, value in node.items():
            if key.startswith("__") or (key in _FUNCTION_KEYS and isinstance(value, str)):
                raise DataError(f"{path}: `{key}: {value}` names code to run; remove it")


def _how(leaf: DatasetSplit) -> str:
    return _prepare(leaf.path)


def _prepare(path: EPath) -> str:
    """Advice on how to make the folder `path` a dataset."""
    return (
        "pack media with `python -m data_prep`, or index existing shards with"
        f" `energon prepare --sample-type CrudeWebdataset {quote(str(path))}`"
    )


def _no_split(leaf: DatasetSplit) -> str:
    if leaf.split != "val":
        return f"{leaf.path} has no samples in split `{leaf.split}`; {_how(leaf)}"
    return (
        f"{leaf.path} has no samples in split `val`; pack the data again with a part for it"
        " (`python -m data_prep ... --split`), set dataset.use_train_split_for_val=true to validate"
        " on training samples, or train.eval_iters=0 to go without"
    )
