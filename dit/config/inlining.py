"""Groups inside a group whose keys stand in the outer group's namespace.

`ObjectiveConfig.edm` is an `EdmConfig`, and its key is `objective.sigma_data`, not
`objective.edm.sigma_data`. A field becomes such a group by its metadata:

    edm: EdmConfig = field(default_factory=EdmConfig, metadata=INLINED)

Everything that a person writes or reads is flat: YAML, command line, `--print-config`, saved
configurations, error messages. The dataclasses are nested. `nested` and `flattened` translate
between the two forms of plain values, and `field_types` tells which names belong where.

A generic dataclass such as `Model[Options]`, whose inlined field is a type variable, is resolved by
its arguments, so the type of an inlined group can be chosen before its keys are read. Records in a
list cannot have inlined groups.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

INLINED = {"inlined": True}
"""Metadata of a dataclass field whose keys stand beside those of the outer group."""


def is_group(kind: object) -> bool:
    """Whether a type is a dataclass, or a generic one with its arguments."""
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and is_dataclass(origin)


@cache
def field_types(group: Any) -> dict[str, Any]:
    """Types of the fields of a dataclass, by name; type variables are replaced by arguments.

    A dataclass whose own fields stand between inherited ones in files has a method `field_order`.
    """
    origin = get_origin(group) or group
    arguments = dict(zip(getattr(origin, "__parameters__", ()), get_args(group), strict=False))
    ordered = getattr(origin, "field_order", lambda: [f.name for f in fields(origin)])
    return {name: _resolved(get_type_hints(origin)[name], arguments) for name in ordered()}


def _resolved(kind: Any, arguments: dict[Any, Any]) -> Any:
    """`kind` with the type variables replaced, also those of a generic dataclass."""
    if isinstance(kind, TypeVar):
        return arguments.get(kind, kind)
    parameters = getattr(kind, "__parameters__", ()) if is_group(kind) else ()
    return kind[tuple(arguments.get(one, one) for one in parameters)] if parameters else kind


@cache
def inlined_groups(group: Any) -> dict[str, Any]:
    """Types of the inlined fields of a dataclass, by name."""
    names = [f.name for f in fields(get_origin(group) or group) if f.metadata.get("inlined")]
    return {name: field_types(group)[name] for name in names}


@cache
def key_types(group: Any) -> dict[str, Any]:
    """Types of the keys of a group, those of its inlined groups in the place of their field.

    Raises:
        TypeError: two groups that share a namespace have a key of the same name.
    """
    found: list[tuple[str, Any]] = []
    for name, kind in field_types(group).items():
        inner = name in inlined_groups(group)
        found += key_types(kind).items() if inner else [(name, kind)]
    names = [name for name, _ in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TypeError(f"{group} has the keys {', '.join(twice)} twice; rename one of each")
    return dict(found)


def nested(group: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Plain values by key -> by field, as the dataclass `group` takes them.

    Keys that are unknown stay where they are.
    """
    rest = dict(values)
    result: dict[str, Any] = {}
    for name, kind in inlined_groups(group).items():
        own = {key: rest.pop(key) for key in key_types(kind) if key in rest}
        result[name] = nested(kind, own)
    for name, value in rest.items():
        kind = field_types(group).get(name)
        inner = is_group(kind) and isinstance(value, dict)
        result[name] = nested(kind, value) if inner else value
    return result


def flattened(group: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Plain values by field, as `dataclasses.asdict` gives them -> by key: the inverse of `nested`.

    The keys of an inlined group come where its field is.
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        kind = field_types(group).get(name)
        if is_group(kind) and isinstance(value, dict):
            value = flattened(kind, value)
        result |= value if name in inlined_groups(group) else {name: value}
    return result


def value_of(group: Any, key: str) -> Any:
    """The value of a key of a group object, which may lie in one of its inlined groups."""
    return _values(group)[key]


def _values(group: Any) -> dict[str, Any]:
    """The values of a group object and its inlined groups, by key."""
    found: dict[str, Any] = {}
    for f in fields(group):
        value = getattr(group, f.name)
        found |= _values(value) if f.metadata.get("inlined") else {f.name: value}
    return found


def key_path(group: Any, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A path of fields, such as (objective, edm, rho), without the names of inlined groups."""
    kind, path = group, ()
    for part in place:
        inner = is_group(kind)
        if not (inner and part in inlined_groups(kind)):
            path = (*path, part)
        kind = field_types(kind).get(str(part)) if inner else None
    return path
