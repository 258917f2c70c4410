"""Plain values -> a checked `RunConfig`, or every problem at once.

Pydantic checks the types of the whole tree and runs each group's own checks. A group whose types
are wrong is not checked further in that pass, so the recipe's values stand in for the wrong ones
and the tree is checked again, until no new problem turns up.

Outside of this module plain values are a tree of keys. Pydantic sees the tree of dataclass fields,
in which an inlined group (`dit.config.inlining`) is a level of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dit.config import Problems, RunConfig
from dit.config.inlining import flattened, key_path, nested
from dit.config.loading.merge import Merged, shown
from dit.config.loading.schema import expected, hints, is_group, type_of

Place = tuple[int | str, ...]  # where in the tree, as ("dataset", "mock_samples", 0, "width")


@cache
def adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def plain(config: RunConfig) -> dict[str, Any]:
    """The tree of keys with enums as text and tuples as lists, as YAML has it."""
    return flattened(RunConfig, adapter().dump_python(config, mode="json"))


def checked_config(merged: Merged, base: dict[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """The configuration, or None and what is wrong with it."""
    tree, base = nested(RunConfig, deepcopy(merged.tree)), nested(RunConfig, base)
    problems: list[str] = []
    doubtful: list[str] = []  # keys for which the recipe's value stands in
    while True:
        try:
            # JSON mode is strict about types and still takes lists for tuples, text for enums.
            config = adapter().validate_json(json.dumps(tree, default=str), strict=True)
        except ValidationError as error:
            found = [
                (place, text)
                for details in error.errors()
                for place, text in _describe(details, tree, merged.origins)
            ]
            problems += [text for _, text in found if not any(key in text for key in doubtful)]
            replaced = {_up_to_key(place) for place, _ in found if place}
            if not replaced:
                return None, problems
            for place in sorted(replaced, key=str):
                doubtful += _stand_in(tree, base, place)
        else:
            return (None if problems else config), problems


def _up_to_key(place: Place) -> Place:
    """The place of a group or key: without what follows the key, such as the index in a list."""
    lengths = range(len(place) + 1)
    return place[: next((n for n in lengths if len(key_path(RunConfig, place[:n])) == 2), None)]


def _stand_in(tree: dict[str, Any], base: dict[str, Any], place: Place) -> list[str]:
    """Puts the recipe's value at a group or key; returns what mentions of it look like."""
    *outer, last = place
    _at(tree, tuple(outer))[last] = deepcopy(_at(base, place))
    path = key_path(RunConfig, place)
    if len(place) == 1:
        return [f"{path[0]}."]
    if len(path) == 2:
        return [f"{path[1]}="]
    return [f"{path[0]}.{key}" for key in _at(base, place)]  # the keys of an inlined group


def _describe(
    details: Any, tree: dict[str, Any], origins: dict[str, str]
) -> list[tuple[Place, str]]:
    """One of pydantic's errors in our words; a group's own check may have several."""
    place: Place = details["loc"]
    path = key_path(RunConfig, place)
    raised = details.get("ctx", {}).get("error")
    if isinstance(raised, Problems):
        return [(place, _contradiction(path, text, origins)) for text in raised.problems]
    lost = place[-1] if details["type"] == "missing" else None
    place, path = (place, path) if lost is None else (place[:-1], path[:-1])
    value, kind = _at(tree, place), type_of(".".join(map(str, path)))
    hint = f"; {lost} is missing" if isinstance(lost, str) else _hint(value, kind)
    text = f"{dotted(path)}={shown(value)} ({_origin(path, origins)}): expected {expected(kind)}"
    return [(place, text + hint)]


def dotted(place: Sequence[int | str]) -> str:
    """`dataset.mock_samples[0].width`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).lstrip(".")


def _at(tree: Any, place: Place) -> Any:
    for part in place:
        tree = tree[part]
    return tree


def _origin(place: Place, origins: dict[str, str]) -> str:
    """Where the value or the list that it stands in was written."""
    for length in range(len(place), 0, -1):
        outer = ".".join(map(str, place[:length]))
        if outer in origins:
            return origins[outer]
    whole = ".".join(map(str, place))
    inner = [where for key, where in origins.items() if key.startswith(f"{whole}.")]
    return inner[-1] if inner else "recipe"


def _hint(value: object, kind: Any) -> str:
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if expected(kind).startswith("text") and isinstance(value, bool | int | float):
        return "; put it in quotes, on a command line as key='\"...\"'"
    if isinstance(kind, type) and issubclass(kind, Enum):
        likely = get_close_matches(str(value).lower(), [str(one.value) for one in kind], n=1)
        return f"; did you mean {likely[0]}?" if likely else ""
    return ""


def _contradiction(place: Place, text: str, origins: dict[str, str]) -> str:
    """A group's own complaint, with the places where the keys it names were set."""
    if not place:
        named = dict.fromkeys(re.findall(r"[a-z_]+\.[a-z_]+", text))
        known = {key: origins[key] for key in named if key in origins}
    else:
        prefix = ".".join(map(str, place))
        kind = type_of(prefix)
        words = re.findall(r"\w+", text)
        names = [name for name in hints(kind) if name in words] if is_group(kind) else []
        keys = {name: (*place, name) for name in names}
        known = {name: _origin(key, origins) for name, key in keys.items()}
        text = f"{dotted(place)}: {text}"
    where = ", ".join(f"{name} from {origin}" for name, origin in known.items())
    return f"{text} [{where}]" if where else text
