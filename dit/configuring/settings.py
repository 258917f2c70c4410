"""YAML files and command lines -> settings: one key, its value, and where it was written.

1. read     a file or the tokens of a command line -> nested values and their places
2. flatten  nested values -> one `Setting` for each key of the configuration
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dit.config import Problems
from dit.configuring.foreign import is_foreign_group
from dit.configuring.schema import is_group, is_known, type_of

COMMAND_LINE = "command line"


class Level(IntEnum):
    """Strength of a setting; the recipe function lies below both."""

    FILE = 0
    COMMAND_LINE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key as a person wrote it."""

    key: str  # dotted, as in model.num_layers
    value: Any  # as YAML reads it, interpolations still unresolved
    origin: str  # `FILE:LINE` or `command line`
    level: Level
    remove: bool = False  # `~key`: forget what weaker or earlier settings say


def read_file(path: Path) -> list[Setting]:
    """Settings of a YAML file, in its order.

    Raises:
        Problems: the file is missing, is no YAML, or is no mapping of keys to values.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = _as_written(OmegaConf.load(path))
    except OSError as error:
        raise Problems(
            [f"{path}: cannot be read ({error.strerror}); check --config-file"]
        ) from error
    except UnicodeDecodeError as error:
        raise Problems([f"{path}: is no text in UTF-8 ({error.reason})"]) from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise Problems([f"{path}{_place(error)}: {_one_line(error)}"]) from error
    if node is None:
        return []
    if not (isinstance(node, yaml.MappingNode) and isinstance(values, dict)):
        raise Problems([f"{path}: must be a mapping such as `train: {{train_iters: 10}}`"])
    lines = {key: f"{path}:{line}" for key, line in _lines(node)}
    return [
        Setting(key=key, value=value, origin=lines.get(key, str(path)), level=Level.FILE)
        for key, value in _flatten(values)
    ]


def _as_written(config: Any) -> Any:
    """Plain values with interpolations and escapes left as they are."""
    # `OmegaConf.to_container` would make no difference between ??? and an escaped one.
    return yaml.safe_load(OmegaConf.to_yaml(config))


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _one_line(error: Exception) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]


def _lines(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Dotted key and line number of everything in a YAML document."""
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    else:
        return
    for name, place, child in children:
        yield f"{prefix}{name}", place.start_mark.line + 1
        yield from _lines(child, f"{prefix}{name}.")


def _flatten(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Descends as far as the configuration has groups; a list of records stays one value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        group = is_foreign_group(key) or (is_known(key) and is_group(type_of(key)))
        if group and isinstance(value, dict):
            yield from _flatten(value, f"{key}.")
        elif not (group and value is None):  # `optimizer:` with every line below it commented out
            yield key, value


def read_tokens(tokens: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Settings of a command line, and one sentence for every token that is none.

    Accepts `a.b=c`, `+a.b=c`, `~a.b`, `--a.b c` and `--a.b=c`.
    """
    settings: list[Setting] = []
    problems: list[str] = []
    waiting = list(tokens)
    while waiting:
        text = waiting.pop(0)
        if text.startswith("--") and "=" not in text:
            if not waiting or waiting[0].startswith("--"):
                problems.append(f"{text} ({COMMAND_LINE}): has no value; write {text}=VALUE")
                continue
            text = f"{text}={waiting.pop(0)}"
        try:
            settings += _read_assignment(text.removeprefix("--"))
        except Problems as found:
            problems += found.problems
    return settings, problems


def _read_assignment(text: str) -> list[Setting]:
    """Raises `Problems` if the text is not of the form KEY=VALUE or ~KEY."""
    key, equals, value = text.lstrip("+").partition("=")
    if text.startswith("~"):
        if equals:
            raise Problems([f"{text} ({COMMAND_LINE}): ~KEY takes no value; write {key.strip()}"])
        return [_typed(_normal(key[1:]), remove=True)]
    if not equals or not key.strip():
        raise Problems([f"{text} ({COMMAND_LINE}): is no override; write KEY=VALUE, ~KEY or --KEY"])
    try:
        parsed = _as_written(OmegaConf.from_dotlist([f"value={value}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise Problems(
            [f"{text} ({COMMAND_LINE}): {_one_line(error)}; quote text as {key}='\"...\"'"]
        ) from error
    assert isinstance(parsed, dict)
    nested = list(_flatten({_normal(key): parsed["value"]})) or [(_normal(key), None)]
    return [_typed(name, item) for name, item in nested]


def _typed(key: str, value: Any = None, *, remove: bool = False) -> Setting:
    return Setting(
        key=key, value=value, origin=COMMAND_LINE, level=Level.COMMAND_LINE, remove=remove
    )


def _normal(key: str) -> str:
    """`a[0].b` as `a.0.b`, without surrounding blanks."""
    return re.sub(r"\[(\d+)\]", r".\1", key.strip())
