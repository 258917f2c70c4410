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

from dit.config import Problems
from dit.config.loading.schema import Schema
from dit.models.family import default_family
from dit.yaml_text import MOST_BYTES, YamlError, parse_toml, parse_yaml

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
    """Settings of a YAML file, or of diffusion-pipe's TOML, in its order.

    Top-level keys that begin with `x-` hold anchors for other lines, and are no settings.

    Raises:
        Problems: the file is missing, is no YAML, or is no mapping of keys to values.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        document = (parse_toml if path.suffix == ".toml" else parse_yaml)(content)
    except OSError as error:
        raise Problems(
            [f"{path}: cannot be read ({error.strerror}); check --config-file"]
        ) from error
    except YamlError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise Problems([f"{place}: {error.problem}"]) from error
    values = {} if document.values is None else document.values
    if not isinstance(values, dict):
        raise Problems([f"{path}: must be a mapping such as `train: {{train_iters: 10}}`"])
    values = {key: value for key, value in values.items() if not str(key).startswith("x-")}
    lines = {key: f"{path}:{line}" for key, line in document.lines.items()}
    return [
        Setting(key=key, value=value, origin=lines.get(key, str(path)), level=Level.FILE)
        for key, value in _flatten(values)
    ]


def _flatten(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Descends as far as the configuration has groups; a list of records stays one value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and _is_group(key):
            yield from _flatten(value, f"{key}.")
        elif value is not None or not _is_group(key):  # `optimizer:` above comments is no setting
            yield key, value


def _is_group(key: str) -> bool:
    """Whether keys lie below this one, here or in another stack; families have the same groups."""
    ours = Schema(default_family().config)
    if ours.is_known(key):
        return ours.is_known_group(key)
    from dit.config.loading.foreign import is_foreign_group

    return is_foreign_group(key)


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
        parsed = parse_yaml(value).values
    except YamlError as error:
        raise Problems(
            [f"{text} ({COMMAND_LINE}): {error.problem}; quote text as {key}='\"...\"'"]
        ) from error
    nested = list(_flatten({_normal(key): parsed})) or [(_normal(key), None)]
    return [_typed(name, item) for name, item in nested]


def _typed(key: str, value: Any = None, *, remove: bool = False) -> Setting:
    return Setting(
        key=key, value=value, origin=COMMAND_LINE, level=Level.COMMAND_LINE, remove=remove
    )


def _normal(key: str) -> str:
    """`a[0].b` as `a.0.b`, without surrounding blanks."""
    return re.sub(r"\[(\d+)\]", r".\1", key.strip())
