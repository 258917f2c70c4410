"""The schema of a configuration: its keys, their types and help texts, from the dataclasses.

The keys of `model` are those of a family's dataclass, so a `Schema` belongs to one family.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from dit.command_line import sentences
from dit.config import ModelConfig, RunConfig
from dit.config.resume import Resume, resume_class


def is_group(kind: object) -> bool:
    """Whether `kind` is a dataclass."""
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def hints(group: Any) -> dict[str, Any]:
    """Key -> type, for the fields of the dataclass `group` in the order of files.

    A dataclass whose files have another order than its fields defines `field_order`.
    """
    types = get_type_hints(group)
    ordered = getattr(group, "field_order", lambda: [one.name for one in fields(group)])
    return {name: types[name] for name in ordered()}


def item_type(kind: object, index: int) -> Any:
    """Type of item `index` of the tuple type `kind` (optional or not); None for other types."""
    lists = [one for one in (kind, *get_args(kind)) if get_origin(one) is tuple]
    items = get_args(lists[0]) if lists else ()
    if len(items) == 2 and items[1] is Ellipsis:
        return items[0]
    return items[index] if index < len(items) else None


@cache
def path_keys(group: Any) -> dict[str, Callable[[str], str]]:
    """Key -> function that resolves its path, for those keys of `group` that are paths."""
    found = {}
    for name, kind in get_type_hints(group, include_extras=True).items():
        found.update((name, mark) for mark in _marks(kind) if callable(mark))
    return found


def _marks(kind: Any) -> Iterator[Any]:
    """Metadata (`Annotated`) of the type `kind` and of each of its alternatives."""
    if get_origin(kind) is Annotated:
        yield from kind.__metadata__
        kind = kind.__origin__
    if get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _marks(part)


def record_type(kind: object) -> type | None:
    """The dataclass of the items of a list type, such as `MockGeometry`; None for other types."""
    item = item_type(kind, 0)
    return item if is_group(item) else None


@dataclass(frozen=True, slots=True)
class Schema:
    """All keys of a run whose network has the configuration class `model`."""

    model: type[ModelConfig]

    @property
    def family(self) -> str:
        """Name of the family that `model` describes."""
        (one,) = [one for one in fields(self.model) if one.name == "family"]
        return str(one.default)

    @property
    def groups(self) -> dict[str, type]:
        """Name of each group -> its dataclass."""
        return {**hints(RunConfig), "model": self.model}

    def type_of(self, key: str) -> Any:
        """Type at a dotted key such as `model.num_layers` or `dataset.mock_samples.0.width`.

        Raises:
            KeyError: the configuration has no such key.
        """
        first, *parts = key.split(".")
        kind: Any = self.groups[first]
        for part in parts:
            if is_group(kind) and part in hints(kind):
                kind = hints(kind)[part]
            elif part.isdecimal() and item_type(kind, int(part)) is not None:
                kind = item_type(kind, int(part))
            else:
                raise KeyError(key)
        return kind

    def is_known(self, key: str) -> bool:
        try:
            self.type_of(key)
        except KeyError:
            return False
        return True

    def is_known_group(self, key: str) -> bool:
        return self.is_known(key) and is_group(self.type_of(key))

    def all_keys(self) -> list[str]:
        """Every dotted key that holds a value, in the order of files."""
        return [f"{group}.{name}" for group, kind in self.groups.items() for name in hints(kind)]

    def resume_class(self, key: str) -> Resume:
        """The resume class of the dotted `key`: the effect of a changed value on a resume."""
        group, _, name = key.partition(".")
        return resume_class(self.groups[group], name)

    def nearest(self, key: str) -> str | None:
        """The known key that is most similar to the unknown `key`; None if none is similar."""
        parent, _, leaf = key.rpartition(".")
        elsewhere = [known for known in self.all_keys() if known.endswith(f".{leaf}")]
        if elsewhere:
            return get_close_matches(key, elsewhere, n=1, cutoff=0)[0]
        siblings = self._siblings(parent)
        # train.iters, optimizer.learning_rate
        for name in (f"{parent}_{leaf}", "".join(word[:1] for word in leaf.split("_"))):
            if name in siblings:
                return siblings[name]
        anywhere = {known.rpartition(".")[2]: known for known in self.all_keys()}
        # Farther ones would be another word by chance: `betas` is no `sets`.
        for names, cutoff in ((siblings, 0.7), (anywhere, 0.8)):
            likely = get_close_matches(leaf, names, n=1, cutoff=cutoff)
            if likely:
                return names[likely[0]]
        known = not parent or self.is_known(parent)
        return None if known else self.nearest(parent.partition(".")[0])

    def _siblings(self, parent: str) -> dict[str, str]:
        """Name -> dotted key of each field of the group `parent`; if it is empty, of each group."""
        if not parent:
            return {name: name for name in self.groups}
        kind = self.type_of(parent) if self.is_known(parent) else None
        return {name: f"{parent}.{name}" for name in hints(kind)} if is_group(kind) else {}

    def reference(self, defaults: RunConfig, keys: Collection[str] | None = None) -> str:
        """Text of `--help=all`: every group and key with its type, default and help text.

        `defaults` has the default values. `keys`, such as `optimizer.lr`, limits the text to these,
        for `--help`.
        """
        parts = []
        for name, kind in self.groups.items():
            chosen = [key for key in hints(kind) if keys is None or f"{name}.{key}" in keys]
            if chosen:
                summary = inspect.getdoc(kind) or ""
                body = _reference_of(kind, getattr(defaults, name), f"{name}.", chosen)
                parts.append(f"{name}: {summary.splitlines()[0]}\n{body}")
        return "\n\n".join(parts)


_WIDEST = 120  # letters of a line of `--help` with the values of a key
_WIDTH = 100  # of a line of its sentence


def schema_of(config: RunConfig) -> Schema:
    """The schema of the family of `config`."""
    return Schema(type(config.model))


def expected(kind: Any) -> str:
    """Phrase for the values that the type `kind` allows, such as `an integer or null`."""
    simple = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if kind in simple:
        return simple[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = [str(member.value) for member in kind]
        return "one of " * (len(values) > 1) + ", ".join(values)
    if get_origin(kind) is tuple:
        return _expected_list(get_args(kind))
    parts = [part for part in get_args(kind) if part is not NoneType]
    if parts:
        return " or ".join([*map(expected, parts), "null"])
    return f"keys of {', '.join(hints(kind))}" if is_group(kind) else str(kind)


def _expected_list(items: tuple[Any, ...]) -> str:
    if items[-1] is not Ellipsis:
        return f"a list of {len(items)} values, each {expected(items[0])}"
    several = {int: "integers", float: "numbers", str: "texts"}
    if is_group(items[0]):
        return f"a list of {{{', '.join(hints(items[0]))}}}"
    return f"a list of {several.get(items[0]) or f'values, each {expected(items[0])}'}"


def _reference_of(group: type, values: object, prefix: str, chosen: Iterable[str]) -> str:
    lines, kinds = [], hints(group)
    for name in chosen:
        kind = kinds[name]
        head = f"  {prefix}{name}"
        if record_type(kind) is None:
            head += f" = {as_typed(getattr(values, name))}"
        line = f"{head}    [{expected(kind)}]"
        lines += textwrap.wrap(line, _WIDEST, subsequent_indent=" " * 8, break_on_hyphens=False)
        sentence = sentences(group).get(name, "")
        lines += textwrap.wrap(sentence, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines += _record_lines(kind, f"{prefix}{name}")
    return "\n".join(lines)


def _record_lines(kind: object, key: str) -> list[str]:
    """Help lines for the keys of a record, if `kind` is a list of records; else none."""
    record = record_type(kind)
    if record is None:
        return []
    texts = sentences(record)
    return [
        line
        for name in hints(record)
        for line in textwrap.wrap(
            f"{key}.N.{name}: {texts.get(name, '')}",
            _WIDTH,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
    ]


def as_typed(value: object) -> str:
    """`value` in the form in which a user types it: null, true, [1, 2]."""
    if isinstance(value, tuple):
        return "[" + ", ".join(as_typed(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value.value) if isinstance(value, Enum) else str(value)
