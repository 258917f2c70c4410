"""Reads a YAML or TOML file that lists several folders, with settings for each.

    resolutions: [512]
    frame_buckets: [1, 33]
    directory:
      - path: photos
        num_repeats: 2
        caption_prefix: "a photo of "
      - path: films
        resolutions: [[832, 480]]

Keys outside `directory` apply to all folders, keys of an item to its folder. Paths are relative to
the file; errors name the key. A TOML file is read as diffusion-pipe reads it: a medium without a
caption gets an empty caption, unless `--missing_caption` or `skip_empty_caption` say otherwise.
"""

from __future__ import annotations

import codecs
import difflib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.media.captions import MissingCaption, TagShuffle
from data_prep.media.frame_selection import FrameRule
from data_prep.media.resizing import Buckets, Fit, Sizing, aspect_buckets, spaced_ratios
from data_prep.refusals import PrepError, short_repr
from data_prep.sources.beside_media import ControlFolder, RejectedFolder
from data_prep.sources.folders import CaptionOptions, FolderCollection
from data_prep.sources.listing import BOTH
from data_prep.sources.loss_masks import MaskFolder
from data_prep.sources.media_source import Input
from dit.local_path import local_path
from dit.parsing import YamlError, parse_toml, parse_yaml
from dit.system_errors import reason

_MOST_SIDE = 1 << 16  # pixels
_MOST_FRAMES = 1 << 20
_MOST_REPEATS = 10_000
_MOST_SHUFFLED = 1_000
_MOST_ITEMS = 1_000  # of a list; aliases of YAML make huge lists of a small file
_MOST_RATIO = 1_000.0

_NOT_READ = {
    "default_mask_file": "each file has a mask of its own, of the same name in mask_path",
}


def is_of_diffusion_pipe(path: Path) -> bool:
    """Whether the dataset file at `path` is diffusion-pipe's (.toml), whose defaults then apply."""
    return path.suffix.lower() == ".toml"


def inputs_of(args: Namespace, basis: Input) -> list[Input]:
    """One input for each folder in the file that --dataset_config names, with its settings.

    Settings that the file does not give are taken from `basis`.

    Raises:
        PrepError: the file cannot be read, or a key or value in it is unknown.
    """
    path: Path = args.dataset_config
    content = _read(path)
    name = next((name for name in ("directory", "directories") if name in content), "directory")
    folders = content.pop(name, None)
    if not isinstance(folders, list) or not folders:
        raise PrepError(
            f"--dataset_config {path} needs a list 'directory', each item with a 'path'; add one"
            " such as directory: [{path: photos}]"
        )
    common = checked(str(path), content)
    inputs = []
    for item in folders:
        folder = item.get("path") if isinstance(item, dict) else None
        if not isinstance(folder, str) or not folder or "\0" in folder:
            raise PrepError(
                f"{path}: item {short_repr(item)} of '{name}' has no 'path'; write its folder there"
            )
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
        raise PrepError(f"--dataset_config {path} cannot be read: {reason(error)}") from None
    except YamlError as error:
        raise PrepError(f"--dataset_config {path}: {error}") from None
    if not isinstance(content, dict):
        raise PrepError(f"--dataset_config {path} holds no keys; list the folders as `directory`")
    return content


def _input(args: Namespace, basis: Input, root: Path, settings: Mapping[str, Any]) -> Input:
    masks, rejected, base = None, None, args.dataset_config.parent
    if "mask_path" in settings:
        folder = local_path(settings["mask_path"], base=base)
        masks = MaskFolder(root=folder, option=f"{args.dataset_config}: mask_path")
    if "rejected_path" in settings:
        folder = local_path(settings["rejected_path"], base=base)
        rejected = RejectedFolder(root=folder, option=f"{args.dataset_config}: rejected_path")
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
        rejected=rejected,
        output=args.output_dir,
    )
    sizings, buckets = _size_rules(args, settings)
    shuffled = settings.get("cache_shuffle_num", 0) or int(settings.get("shuffle_tags", False))
    delimiter = settings.get("cache_shuffle_delimiter", ", ")
    return replace(
        basis,
        collection=collection,
        sizings=sizings or basis.sizings,
        frames=_frame_rule(basis.frames, buckets, settings),
        repeats=settings.get("num_repeats", 1.0),
        caption_prefix=settings.get("caption_prefix", ""),
        shuffle=TagShuffle(count=shuffled, delimiter=delimiter) if shuffled else None,
        skips_uncaptioned=args.missing_caption is None
        and settings.get("skip_empty_caption", False),
    )


def _captions(args: Namespace, settings: Mapping[str, Any]) -> CaptionOptions:
    """Options for finding captions in a folder, from `args`, its `settings`, and the file's format.

    For a medium without a caption, --missing_caption decides, then `skip_empty_caption` in
    `settings`. Without these two, it gets the empty caption (TOML) or its file name (YAML).
    """
    missing = MissingCaption.FILENAME
    if "skip_empty_caption" in settings:
        skipped = settings["skip_empty_caption"]
        missing = MissingCaption.REFUSE if skipped else MissingCaption.EMPTY
    elif is_of_diffusion_pipe(args.dataset_config):
        missing = MissingCaption.EMPTY
    captions = CaptionOptions.of(args, missing)
    return replace(captions, field=settings.get("caption_field", captions.field))


def _size_rules(
    args: Namespace, settings: Mapping[str, Any]
) -> tuple[tuple[Sizing, ...], tuple[int, ...]]:
    """Returns (rules, frames): the size rules in `settings`, and the allowed numbers of frames.

    Each rule makes one sample of each medium. `frames` has the numbers of frames that a clip may
    have; it is empty if `settings` gives none.
    """
    multiple = args.size_multiple
    # 1 is left out: it allows pictures, but a video must not become a single frame.
    buckets = tuple(n for n in settings.get("frame_buckets", ()) if n > 1)
    if "size_buckets" in settings:
        sizes = settings["size_buckets"]
        given = tuple((_in_patches(w, multiple), _in_patches(h, multiple)) for w, h, _ in sizes)
        return (Buckets(sizes=given, center_crop=args.center_crop),), tuple(
            sorted({n for _, _, n in sizes if n > 1})
        )
    ratios = _bucket_ratios(settings)
    rules: list[Sizing] = []
    for wide, high in settings.get("resolutions", ()):
        if wide * high < multiple**2:
            patch = f"one patch of {multiple} x {multiple} pixels"
            raise ValueError(f"resolutions: {wide} x {high} is less than {patch}; raise it")
        if ratios is None and args.bucketing == "native":
            rules.append(Fit(size_multiple=multiple, max_pixels=wide * high))
        else:
            sizes = aspect_buckets(budget=wide * high, multiple=multiple, ratios=ratios)
            rules.append(Buckets(sizes=sizes, center_crop=args.center_crop))
    return tuple(rules), buckets


def _frame_rule(
    rule: FrameRule, buckets: tuple[int, ...], settings: Mapping[str, Any]
) -> FrameRule:
    key = "size_buckets" if "size_buckets" in settings else "frame_buckets"
    try:
        return replace(rule, buckets=buckets or rule.buckets)
    except PrepError as error:
        raise ValueError(f"{key}: {error}") from None


def _in_patches(side: int, multiple: int) -> int:
    if side % multiple:
        near = max(1, round(side / multiple)) * multiple
        raise ValueError(
            f"size_buckets: {side} is not a multiple of {multiple} pixels; write {near}"
        )
    return side


def _bucket_ratios(settings: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Aspect ratios (width / height) of buckets in `settings`; None if the options decide them."""
    if "ar_buckets" in settings:
        return settings["ar_buckets"]
    if "num_ar_buckets" in settings:
        least, most = settings.get("min_ar", 0.5), settings.get("max_ar", 2.0)
        return spaced_ratios(least=least, most=most, count=settings["num_ar_buckets"])
    return (1.0,) if settings.get("enable_ar_bucket") is False else None


def checked(where: str, content: Mapping[Any, Any]) -> dict[str, Any]:
    """Checks keys and values of `content`, and returns the parsed settings.

    `where` is the file, or the file and the folder, for messages.

    Raises:
        PrepError: a key is unknown, or its value is not allowed.
    """
    settings = {}
    for key, value in content.items():
        if key in _NOT_READ:
            raise PrepError(f"{where}: {key}: {_NOT_READ[key]}; remove the key")
        if not isinstance(key, str) or key not in KEYS:
            raise PrepError(f"{where}: unknown key {short_repr(key)}{_hint(key)}")
        try:
            settings[key] = KEYS[key](value)
        except ValueError as error:
            raise PrepError(f"{where}: {key}: {error}") from None
    return settings


def _hint(key: Any) -> str:
    near = difflib.get_close_matches(key, KEYS, 1) if isinstance(key, str) else ()
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(KEYS)}"


def _wrong(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{short_repr(value)} is not {wanted}")


def _whole(value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(value, f"a whole number from {least} to {most}")
    return value


def _number(value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise _wrong(value, f"a number above 0, at most {most:g}")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, "true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(value, "valid Unicode") from None
    return value


def _filled(value: Any) -> str:
    if not _text(value):
        raise _wrong(value, "a non-empty text")
    return value


def _items(value: Any, example: str) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_ITEMS:
        raise _wrong(value, f"a list of 1 to {_MOST_ITEMS} items, such as {example}")
    return value


def _side(value: Any) -> int:
    return _whole(value, 1, _MOST_SIDE)


def _pair(value: Any, example: str) -> tuple[int, int]:
    if len(value) != 2:
        raise _wrong(value, f"width and height, such as {example}")
    return _side(value[0]), _side(value[1])


def _resolutions(value: Any) -> tuple[tuple[int, int], ...]:
    return tuple(
        _pair(side, "[832, 480]") if isinstance(side, list) else (_side(side), _side(side))
        for side in _items(value, "[512] or [[832, 480]]")
    )


def _ratios(value: Any) -> tuple[float, ...]:
    def ratio(item: Any) -> float:
        if isinstance(item, list):
            wide, high = _pair(item, "[448, 576]")
            item = wide / high
        if _number(item, _MOST_RATIO) < 1 / _MOST_RATIO:
            raise _wrong(item, f"a ratio of at least {1 / _MOST_RATIO:g}")
        return float(item)

    return tuple(ratio(item) for item in _items(value, "[0.5, 1.0] or [[448, 576]]"))


def _frames(value: Any) -> tuple[int, ...]:
    return tuple(_whole(item, 1, _MOST_FRAMES) for item in _items(value, "[1, 33]"))


def _sizes(value: Any) -> tuple[tuple[int, int, int], ...]:
    def size(item: Any) -> tuple[int, int, int]:
        if not isinstance(item, list) or len(item) != 3:
            raise _wrong(item, "width, height and frames, such as [832, 480, 33]")
        return _side(item[0]), _side(item[1]), _whole(item[2], 1, _MOST_FRAMES)

    return tuple(size(item) for item in _items(value, "[[832, 480, 33]]"))


def _folders(value: Any) -> tuple[str, ...]:
    return tuple(map(_filled, _items(value if isinstance(value, list) else [value], '["before"]')))


def _ratio(value: Any) -> float:
    return _ratios([value])[0]


KEYS: dict[str, Callable[[Any], Any]] = {
    "resolutions": _resolutions,
    "enable_ar_bucket": _flag,
    "min_ar": _ratio,
    "max_ar": _ratio,
    "num_ar_buckets": lambda value: _whole(value, 1, _MOST_ITEMS),
    "ar_buckets": _ratios,
    "frame_buckets": _frames,
    "size_buckets": _sizes,
    "num_repeats": lambda value: _number(value, _MOST_REPEATS),
    "caption_prefix": _text,
    "caption_field": _text,
    "skip_empty_caption": _flag,
    "mask_path": _filled,
    "rejected_path": _filled,
    "control_path": _folders,
    "shuffle_tags": _flag,
    "cache_shuffle_num": lambda value: _whole(value, 0, _MOST_SHUFFLED),
    "cache_shuffle_delimiter": _filled,
}
