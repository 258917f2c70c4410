"""Several folders with settings of their own, from one YAML or TOML file.

    resolutions: [512]
    frame_buckets: [1, 33]
    directory:
      - path: photos
        num_repeats: 2
        caption_prefix: "a photo of "
      - path: films
        resolutions: [[832, 480]]

What stands above `directory` holds for all, what stands in an item for that folder. Paths are
relative to the file.
"""

from __future__ import annotations

import difflib
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from data_prep.media_options import captions_of
from data_prep.refusals import PrepError
from data_prep.sizing import Buckets, Fit, Sizing, aspect_buckets, spaced_ratios
from data_prep.sources.folders import FolderCollection
from data_prep.sources.listing import BOTH
from data_prep.sources.media import Input

_KEYS = (
    "resolutions", "enable_ar_bucket", "min_ar", "max_ar", "num_ar_buckets", "ar_buckets",
    "frame_buckets", "size_buckets", "num_repeats", "caption_prefix", "caption_field",
)  # fmt: skip


def inputs_of(args: Namespace, basis: Input) -> list[Input]:
    """One input for each folder, `basis` with what the file says of it.

    Raises:
        PrepError: the file cannot be read, or a key or value in it is unknown.
    """
    path: Path = args.dataset_config
    content = _read(path)
    folders = content.pop("directory", content.pop("directories", None))
    if not isinstance(folders, list) or not folders:
        raise PrepError(f"{path} needs a list 'directory', each item with a 'path'")
    _check_keys(path, content)
    inputs = []
    for item in folders:
        if not isinstance(item, dict) or not isinstance(item.get("path"), str):
            raise PrepError(f"{path}: an item of 'directory' has no 'path': {item}")
        settings = {**content, **item}
        _check_keys(path, {key: value for key, value in settings.items() if key != "path"})
        inputs.append(_input(args, basis, path, settings))
    return inputs


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise PrepError(f"--dataset_config {path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise PrepError(f"--dataset_config {path}: {error}") from None
    if not isinstance(content, dict):
        raise PrepError(f"--dataset_config {path} holds no keys and values")
    return content


def _check_keys(path: Path, content: Mapping[str, Any]) -> None:
    for key in content:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(_KEYS)}"
            raise PrepError(f"{path}: unknown key {key!r}{hint}")


def _input(args: Namespace, basis: Input, path: Path, settings: dict[str, Any]) -> Input:
    captions = captions_of(args)
    captions = replace(captions, field=settings.get("caption_field", captions.field))
    collection = FolderCollection(
        root=path.parent / settings["path"], captions=captions, kinds=BOTH, option=f"{path}: path"
    )
    try:
        repeats = float(settings.get("num_repeats", 1))
        sizings, buckets = _sizes(args, settings)
    except (TypeError, ValueError) as error:
        raise PrepError(f"{path}, folder {settings['path']}: {error}") from None
    if repeats <= 0:
        raise PrepError(f"{path}, folder {settings['path']}: num_repeats {repeats} must be above 0")
    frames = replace(basis.frames, buckets=buckets) if buckets else basis.frames
    return replace(
        basis,
        collection=collection,
        sizings=sizings or basis.sizings,
        frames=frames,
        repeats=repeats,
        caption_prefix=str(settings.get("caption_prefix", "")),
    )


def _sizes(args: Namespace, settings: dict[str, Any]) -> tuple[tuple[Sizing, ...], tuple[int, ...]]:
    """The rules for sizes, a sample for each, and the numbers of frames of videos."""
    multiple = args.size_multiple
    # Videos never become a single frame because a still is allowed.
    buckets = tuple(n for n in settings.get("frame_buckets", ()) if n > 1)
    if "size_buckets" in settings:
        sizes = settings["size_buckets"]
        given = tuple((_whole(w, multiple), _whole(h, multiple)) for w, h, _ in sizes)
        return (Buckets(sizes=given, center_crop=args.center_crop),), tuple(
            sorted({n for _, _, n in sizes if n > 1})
        )
    ratios = _ratios(settings)
    rules: list[Sizing] = []
    for resolution in settings.get("resolutions", ()):
        wide, high = resolution if isinstance(resolution, list) else (resolution, resolution)
        if ratios is None and args.bucketing == "native":
            rules.append(Fit(size_multiple=multiple, max_pixels=wide * high))
        else:
            sizes = aspect_buckets(budget=wide * high, multiple=multiple, ratios=ratios)
            rules.append(Buckets(sizes=sizes, center_crop=args.center_crop))
    return tuple(rules), buckets


def _whole(side: int, multiple: int) -> int:
    if side % multiple:
        near = max(1, round(side / multiple)) * multiple
        raise ValueError(f"size_buckets: {side} is no multiple of {multiple} pixels; write {near}")
    return side


def _ratios(settings: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Ratios of the buckets; None leaves the choice to the command line."""
    if "ar_buckets" in settings:
        given = settings["ar_buckets"]
        return tuple(r[0] / r[1] if isinstance(r, list) else float(r) for r in given)
    if "num_ar_buckets" in settings:
        least, most = float(settings.get("min_ar", 0.5)), float(settings.get("max_ar", 2.0))
        return spaced_ratios(least=least, most=most, count=int(settings["num_ar_buckets"]))
    return (1.0,) if settings.get("enable_ar_bucket") is False else None
