"""The keys of a dataset file, and checks of their values; errors name the key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from data_prep.refusals import PrepError, short_repr

_MOST_SIDE = 1 << 16  # pixels
_MOST_FRAMES = 1 << 20
_MOST_REPEATS = 10_000
_MOST_SHUFFLED = 1_000
_MOST_ITEMS = 1_000  # of a list; aliases of YAML make huge lists of a small file
_MOST_RATIO = 1_000.0

_NOT_READ = {
    "default_mask_file": "a mask belongs to the file of its name, in mask_path",
}


def checked(where: str, content: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings in `content`, with checked types; `where` is the file and folder for messages.

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
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(KEYS)}"


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
        raise _wrong(value, "a text that is Unicode") from None
    return value


def _filled(value: Any) -> str:
    if not _text(value):
        raise _wrong(value, "a text with something in it")
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
    "control_path": _folders,
    "shuffle_tags": _flag,
    "cache_shuffle_num": lambda value: _whole(value, 0, _MOST_SHUFFLED),
    "cache_shuffle_delimiter": _filled,
}
