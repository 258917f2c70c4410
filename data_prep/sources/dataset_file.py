"""Several folders with settings of their own, from a YAML or TOML file.

    resolutions: [512]
    frame_buckets: [1, 33]
    directory:
      - path: photos
        num_repeats: 2
        caption_prefix: "a photo of "
      - path: films
        resolutions: [[832, 480]]

Keys outside `directory` apply to all folders, keys of an item to its folder. Paths are relative to
the file. A TOML file is read as diffusion-pipe reads it: a medium without a caption gets an empty
caption, unless `--missing_caption` or `skip_empty_caption` say otherwise.
"""

from __future__ import annotations

import codecs
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.media.captions import MissingCaption, TagShuffle
from data_prep.media.frame_selection import FrameRule
from data_prep.media.resizing import Buckets, Fit, Sizing, aspect_buckets, spaced_ratios
from data_prep.refusals import PrepError, short_repr
from data_prep.sources.dataset_keys import checked
from data_prep.sources.folders import CaptionOptions, FolderCollection
from data_prep.sources.listing import BOTH
from data_prep.sources.masks import MaskFolder
from data_prep.sources.media_source import Input
from data_prep.sources.references import ControlFolder
from dit.local_path import local_path
from dit.parsing import YamlError, parse_toml, parse_yaml


def is_of_diffusion_pipe(path: Path) -> bool:
    """Whether a dataset file is one of diffusion-pipe, whose defaults then apply."""
    return path.suffix.lower() == ".toml"


def inputs_of(args: Namespace, basis: Input) -> list[Input]:
    """One input for each folder: `basis` with the settings in the file.

    Raises:
        PrepError: the file cannot be read, or a key or value in it is unknown.
    """
    path: Path = args.dataset_config
    content = _read(path)
    name = next((name for name in ("directory", "directories") if name in content), "directory")
    folders = content.pop(name, None)
    if not isinstance(folders, list) or not folders:
        raise PrepError(f"{path} needs a list 'directory', each item with a 'path'")
    common = checked(str(path), content)
    inputs = []
    for item in folders:
        folder = item.get("path") if isinstance(item, dict) else None
        if not isinstance(folder, str) or not folder or "\0" in folder:
            raise PrepError(f"{path}: an item of '{name}' has no 'path': {short_repr(item)}")
        where = f"{path}, folder {folder}"
        own = checked(where, {key: value for key, value in item.items() if key != "path"})
        try:
            root = local_path(folder, base=path.parent)
            inputs.append(_input(args, basis, root, {**common, **own}))
        except ValueError as error:
            raise PrepError(f"{where}: {error}") from None
    return inputs


def _read(path: Path) -> dict[str, Any]:
    parse = parse_toml if is_of_diffusion_pipe(path) else parse_yaml
    try:
        content = parse(path.read_bytes().removeprefix(codecs.BOM_UTF8)).values
    except OSError as error:
        raise PrepError(f"--dataset_config {path} cannot be read: {error.strerror}") from None
    except YamlError as error:
        raise PrepError(f"--dataset_config {path}: {error}") from None
    if not isinstance(content, dict):
        raise PrepError(f"--dataset_config {path} holds no keys and values")
    return content


def _input(args: Namespace, basis: Input, root: Path, settings: Mapping[str, Any]) -> Input:
    masks, base = None, args.dataset_config.parent
    if "mask_path" in settings:
        folder = local_path(settings["mask_path"], base=base)
        masks = MaskFolder(root=folder, option=f"{args.dataset_config}: mask_path")
    controls = tuple(
        ControlFolder(
            root=local_path(path, base=base), option=f"{args.dataset_config}: control_path"
        )
        for path in settings.get("control_path", ())
    )
    collection = FolderCollection(
        root=root,
        captions=_captions(args, settings),
        kinds=BOTH,
        option=f"{args.dataset_config}: path",
        masks=masks,
        controls=controls,
        output=args.output_dir,
    )
    sizings, buckets = _sizes(args, settings)
    shuffled = settings.get("cache_shuffle_num", 0) or int(settings.get("shuffle_tags", False))
    delimiter = settings.get("cache_shuffle_delimiter", ", ")
    return replace(
        basis,
        collection=collection,
        sizings=sizings or basis.sizings,
        frames=_frames(basis.frames, buckets, settings),
        repeats=settings.get("num_repeats", 1.0),
        caption_prefix=settings.get("caption_prefix", ""),
        shuffle=TagShuffle(count=shuffled, delimiter=delimiter) if shuffled else None,
        skips_uncaptioned=args.missing_caption is None
        and settings.get("skip_empty_caption", False),
    )


def _captions(args: Namespace, settings: Mapping[str, Any]) -> CaptionOptions:
    """Caption options: `--missing_caption` first, then the file, then its tool's default."""
    missing = MissingCaption.FILENAME
    if "skip_empty_caption" in settings:
        skipped = settings["skip_empty_caption"]
        missing = MissingCaption.REFUSE if skipped else MissingCaption.EMPTY
    elif is_of_diffusion_pipe(args.dataset_config):
        missing = MissingCaption.EMPTY
    captions = CaptionOptions.of(args, missing)
    return replace(captions, field=settings.get("caption_field", captions.field))


def _sizes(
    args: Namespace, settings: Mapping[str, Any]
) -> tuple[tuple[Sizing, ...], tuple[int, ...]]:
    """The rules for sizes, one sample for each, and the allowed numbers of frames."""
    multiple = args.size_multiple
    # Without 1, which allows pictures: a video must not become a single frame.
    buckets = tuple(n for n in settings.get("frame_buckets", ()) if n > 1)
    if "size_buckets" in settings:
        sizes = settings["size_buckets"]
        given = tuple((_whole(w, multiple), _whole(h, multiple)) for w, h, _ in sizes)
        return (Buckets(sizes=given, center_crop=args.center_crop),), tuple(
            sorted({n for _, _, n in sizes if n > 1})
        )
    ratios = _ratios(settings)
    rules: list[Sizing] = []
    for wide, high in settings.get("resolutions", ()):
        if wide * high < multiple**2:
            patch = f"one patch of {multiple} x {multiple} pixels"
            raise ValueError(f"resolutions: {wide} x {high} is less than {patch}")
        if ratios is None and args.bucketing == "native":
            rules.append(Fit(size_multiple=multiple, max_pixels=wide * high))
        else:
            sizes = aspect_buckets(budget=wide * high, multiple=multiple, ratios=ratios)
            rules.append(Buckets(sizes=sizes, center_crop=args.center_crop))
    return tuple(rules), buckets


def _frames(rule: FrameRule, buckets: tuple[int, ...], settings: Mapping[str, Any]) -> FrameRule:
    key = "size_buckets" if "size_buckets" in settings else "frame_buckets"
    try:
        return replace(rule, buckets=buckets or rule.buckets)
    except PrepError as error:
        raise ValueError(f"{key}: {error}") from None


def _whole(side: int, multiple: int) -> int:
    if side % multiple:
        near = max(1, round(side / multiple)) * multiple
        raise ValueError(f"size_buckets: {side} is no multiple of {multiple} pixels; write {near}")
    return side


def _ratios(settings: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Aspect ratios of the buckets; None leaves them to the command line."""
    if "ar_buckets" in settings:
        return settings["ar_buckets"]
    if "num_ar_buckets" in settings:
        least, most = settings.get("min_ar", 0.5), settings.get("max_ar", 2.0)
        return spaced_ratios(least=least, most=most, count=settings["num_ar_buckets"])
    return (1.0,) if settings.get("enable_ar_bucket") is False else None
