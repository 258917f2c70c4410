"""Lists the settings of a checkout's layers and who sets them; `measure_house` runs it there.

A setting is a field of the types that specify layers (`StackSpec.layer`, nested types included) in
the networks of all named and tiny sizes. It belongs to the class that declares it; classes in a
family's own folder do not count. A family sets a field if the field's value is not
the default; a field without a default is always set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from dit.models.registry import families, family_places


def layer_settings() -> dict[str, list[str]]:
    """Names of the families that set each setting of layers, by "Type.field"."""
    folders = {place.rpartition(".")[0] for place in family_places().values()}
    found: dict[str, set[str]] = defaultdict(set)
    for family in families():
        named = [{"name": size, **keys} for size, keys in family.sizes.items()]
        tiny = [
            {**family.sizes[size], **keys, "name": "custom"} for size, keys in family.tiny.items()
        ]
        for keys in (*named, *tiny):
            for stack in family.spec(family.config(**keys)).stacks:
                for value, field in _nested(stack.layer):
                    owner = _owner(type(value), field.name)
                    if owner.__module__.rpartition(".")[0] not in folders:
                        setters = found[f"{owner.__name__}.{field.name}"]
                        if getattr(value, field.name) != _default(field):
                            setters.add(family.name)
    return {name: sorted(names) for name, names in sorted(found.items())}


def _nested(value: Any) -> Iterator[tuple[Any, Field[Any]]]:
    """Yields (instance, field) for each field of each dataclass in `value`, nested ones too."""
    if isinstance(value, tuple):
        for one in value:
            yield from _nested(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield value, field
            yield from _nested(getattr(value, field.name))


def _owner(kind: type, name: str) -> type:
    return next(
        one for one in reversed(kind.__mro__) if name in vars(one).get("__annotations__", ())
    )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
