"""Settings with their origins: read, then merged over a recipe.

1. read     a YAML file or the tokens of a command line become nested values with their lines
2. flatten  nested values become one `Setting` for each key of the configuration
3. remove   `~key` discards weaker and earlier settings of the key
4. size     `model.name` becomes the keys of the size; explicit keys of its level override them
5. resolve  `${other.key}` and `${oc.env:VAR,default}`, and nothing else, become values

`value_of` resolves a single key, because the model family is chosen before other keys are read.
`escaped` protects the text of recipes and saved files from the fifth stage.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from dit.config import Problems
from dit.config_loading.schema import Schema
from dit.models.registry import default_family
from dit.parsing import MOST_BYTES, YamlError, parse_toml, parse_yaml
from dit.system_errors import reason

COMMAND_LINE = "command line"
MOST_REFERENCES = 16

# One interpolation without another inside: a key of this configuration, or a variable of the shell.
_ALLOWED = re.compile(r"\$\{\s*(?:oc\.env\s*:[^${}]*|[A-Za-z_.][\w.\[\]]*)\s*\}")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")
_SECRET = re.compile("api_key|secret|password|token$")
_NAME = re.compile(r"\$\{(\w+)\}")
# What stands for `${`: an odd number of backslashes before it, as OmegaConf reads them.
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")


class Level(IntEnum):
    """Precedence of a setting by its origin, the higher the stronger; a recipe is below both."""

    FILE = 0
    COMMAND_LINE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A key and its value as the user wrote them, and where they were written."""

    key: str  # dotted, as in model.num_layers
    value: Any  # as YAML reads it, interpolations still unresolved
    origin: str  # `FILE:LINE` or `command line`
    level: Level
    remove: bool = False  # `~key`: forget what weaker or earlier settings say


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """The values of a YAML or TOML file, and the line of each key."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]  # dotted key -> line, from 1; TOML has none

    def origin(self, key: str) -> str:
        """Origin of the dotted `key` as `FILE:LINE`, or `FILE` if its line is unknown."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else str(self.path)

    def settings(self) -> list[Setting]:
        """A setting for each key, in the order of the file."""
        return [
            Setting(key=key, value=value, origin=self.origin(key), level=Level.FILE)
            for key, value in _flatten(self.values)
        ]


def read_file(path: Path) -> File:
    """The values of a YAML or TOML file, without top-level keys `x-...`, which hold anchors.

    A missing file such as conf/dit_xl_image.yaml is taken from the installed package.

    Raises:
        Problems: the file is missing, is not YAML, or is not a mapping of keys to values.
    """
    path = path if path.exists() else _bundled(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        document = (parse_toml if path.suffix == ".toml" else parse_yaml)(content)
    except OSError as error:
        raise Problems(
            [f"{path}: cannot be read ({reason(error)}); check --config-file"]
        ) from error
    except YamlError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise Problems([f"{place}: {error.problem}"]) from error
    values = {} if document.values is None else document.values
    if not isinstance(values, dict):
        raise Problems([f"{path}: must be a mapping such as `train: {{train_iters: 10}}`"])
    values = {key: value for key, value in values.items() if not str(key).startswith("x-")}
    return File(path=path, values=values, lines=document.lines)


def _bundled(path: Path) -> Path:
    """The file `path` next to the installed recipes if it exists there, else `path` itself."""
    recipes = find_spec("recipes")
    if recipes is None or recipes.origin is None:
        return path
    found = Path(recipes.origin).parent / path
    return found if found.is_file() else path


def _flatten(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) pairs of nested `values`; the value of a known key is not divided."""
    ours = Schema(default_family().config)  # families have the same groups
    for name, value in values.items():
        key = f"{prefix}{name}"
        is_group = ours.is_known_group(key)
        if isinstance(value, dict) and (is_group or (value and not ours.is_known(key))):
            yield from _flatten(value, f"{key}.")
        elif value is not None or not is_group:  # `optimizer:` above comments is no setting
            yield key, value


def read_tokens(tokens: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Settings of a command line, and an error message for each token that is none.

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
    """Settings of one token KEY=VALUE or ~KEY; raises `Problems` for other text."""
    key, equals, value = text.lstrip("+").partition("=")
    if text.startswith("~"):
        if equals:
            raise Problems([f"{text} ({COMMAND_LINE}): ~KEY takes no value; write {key.strip()}"])
        return [_typed(_normal(key[1:]), remove=True)]
    if not equals or not key.strip():
        file = text.endswith((".yaml", ".yml"))
        form = f"--config-file {text}" if file else "KEY=VALUE, ~KEY or --KEY VALUE"
        raise Problems([f"{text} ({COMMAND_LINE}): is not an override; write {form}"])
    if not value.isascii() and value != value.encode(errors="replace").decode():
        raise Problems(
            [
                f"{text} ({COMMAND_LINE}): has bytes that are not UTF-8; write it in UTF-8, or set"
                " LC_ALL=C.UTF-8 before the command"
            ]
        )
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
    """The dotted key in normal form: `a[0].b` as `a.0.b`, `a-b` as `a_b`, stripped."""
    return re.sub(r"\[(\d+)\]", r".\1", key.strip().replace("-", "_"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """Result of merging settings over a recipe's values."""

    tree: dict[str, Any]
    origins: dict[str, str]  # dotted key -> `FILE:LINE` or `command line`
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def merge(
    base: dict[str, Any], settings: list[Setting], sizes: Mapping[str, Mapping[str, Any]]
) -> Merged:
    """Merges `settings`, weakest first, into the plain values `base` of a recipe.

    `sizes` maps each `model.name` to the dotted keys that it sets. A value that cannot be resolved
    is a problem, and is replaced by the recipe's.
    """
    problems: list[str] = []
    settings = _bounded(without_removed(settings), problems)
    settings, notices = _with_named_size(escaped(base), settings, sizes)
    notices += _from_environment(settings)
    origins = {setting.key: setting.origin for setting in settings}
    if (laid := _laid_plainly(base, settings)) is not None:
        return Merged(tree=laid, origins=origins, problems=problems, notices=notices)
    base = escaped(base)
    whole = _overlaid(base, settings, problems)
    # The last one of a key is in force; those that it replaces are not at fault.
    for setting in {setting.key: setting for setting in settings}.values():
        _resolve(whole, base, setting, problems)
    tree: Any = OmegaConf.to_container(whole, resolve=True)
    return Merged(tree=tree, origins=origins, problems=problems, notices=notices)


def value_of(key: str, base: dict[str, Any], settings: list[Setting]) -> Setting | None:
    """The strongest setting of `key`, with its value resolved; None if no setting has the key."""
    settings = _bounded(without_removed(settings), [])
    named = [setting for setting in settings if setting.key == key]
    if not named:
        return None
    return replace(named[-1], value=_resolved(escaped(base), settings, named[-1]))


def _resolved(base: dict[str, Any], settings: list[Setting], chosen: Setting) -> Any:
    """The resolved value of the setting `chosen`, or the recipe's if it cannot be resolved."""
    if _stands_alone(chosen.value):
        return chosen.value
    unsaid: list[str] = []
    whole = _overlaid(base, settings, unsaid)
    _resolve(whole, base, chosen, unsaid)
    return OmegaConf.select(whole, chosen.key)


def _stands_alone(value: object) -> bool:
    """Whether `value` has nothing for OmegaConf to resolve; resolving takes 50 ms."""
    if isinstance(value, str):
        return not any(mark in value for mark in ("${", "\\", "???"))
    if isinstance(value, list):
        return all(map(_stands_alone, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(
            map(_stands_alone, (*value, *value.values()))
        )
    return value is None or isinstance(value, bool | int | float)


def _laid_plainly(base: dict[str, Any], settings: list[Setting]) -> dict[str, Any] | None:
    """Copy of `base` with `settings` assigned, made without OmegaConf.

    None if any setting needs interpolation, which almost no configuration does.
    """
    tree = {name: dict(group) for name, group in base.items() if isinstance(group, dict)}
    for setting in settings:
        group, _, name = setting.key.partition(".")
        if group not in tree or not name.isidentifier() or not _stands_alone(setting.value):
            return None
        tree[group][name] = setting.value
    return copy.deepcopy(base | tree)


def escaped(value: Any) -> Any:
    """`value` with every text escaped, so that OmegaConf resolves it to the original text."""
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if not isinstance(value, str):
        return value
    # Backslashes count only before `${`, and before `???` when there is nothing else.
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return f"\\{text}" if re.fullmatch(r"\\*\?\?\?", text) else text


def named(setting: Setting) -> str:
    """The setting as `key=value (origin)` for messages; values of secret keys are hidden."""
    value = '"***"' if _SECRET.search(setting.key) and setting.value else shown(setting.value)
    text = f"~{setting.key}" if setting.remove else f"{setting.key}={value}"
    return f"{text} ({setting.origin})"


def shown(value: object) -> str:
    """`value` as JSON, cut to 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def legible(text: str) -> str:
    """`text` on one line, with control and hidden characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _bounded(settings: list[Setting], problems: list[str]) -> list[Setting]:
    """Limits the interpolations in `settings`; returns the settings that may be resolved.

    If all settings together have more than `MOST_REFERENCES` interpolations, an error is added to
    `problems`, and the settings that have any are left out. Each interpolation may lead to a text
    with several others, so their number is limited beforehand.
    """
    counts = [
        sum(_ESCAPED.sub("", text).count("${") for text in _strings(setting.value))
        for setting in settings
    ]
    if sum(counts) <= MOST_REFERENCES:
        return settings
    problems.append(
        f"{sum(counts)} references such as ${{other.key}} in all, the last in"
        f" {[s.key for s, count in zip(settings, counts, strict=True) if count][-1]}: a"
        f" configuration takes at most {MOST_REFERENCES}; write values out"
    )
    return [setting for setting, count in zip(settings, counts, strict=True) if not count]


def _from_environment(settings: list[Setting]) -> list[str]:
    """Notices about settings that contain environment variables, without the variables' values."""
    return [
        f"{setting.key}={shown(setting.value)} ({setting.origin}): read from the environment"
        for setting in settings
        if any(_ENVIRONMENT.search(_ESCAPED.sub("", text)) for text in _strings(setting.value))
    ]


def without_removed(settings: list[Setting]) -> list[Setting]:
    """`settings` without those that a later `~key` discards, and without `~key` itself."""
    kept: list[Setting] = []
    for setting in settings:
        if setting.remove:
            below = f"{setting.key}."
            kept = [one for one in kept if not f"{one.key}.".startswith(below)]
        else:
            kept.append(setting)
    return kept


def _with_named_size(
    base: dict[str, Any], settings: list[Setting], sizes: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Setting], list[str]]:
    """Adds to `settings` those that the strongest `model.name` implies: (settings, notices).

    The implied settings stand before the other settings of the level of `model.name`, which
    override them. There is a notice for each weaker setting whose value the size replaces.
    """
    named = [setting for setting in settings if setting.key == "model.name"]
    if not named:
        return settings, []
    chosen = named[-1]
    name = _resolved(base, settings, chosen)
    size = sizes.get(name, {}) if isinstance(name, str) else {}
    implied = [
        Setting(
            key=key,
            value=json.loads(json.dumps(value)),  # enums and tuples as YAML has them
            origin=f"model.name={name}, {chosen.origin}",
            level=chosen.level,
        )
        for key, value in size.items()
    ]
    weaker = [setting for setting in settings if setting.level < chosen.level]
    others = [setting for setting in settings if setting.level >= chosen.level]
    sized = {setting.key: setting.value for setting in implied}
    notices = [
        f"{one.key}={shown(one.value)} ({one.origin}) gives way to"
        f" model.name={name} ({chosen.origin}): {shown(sized[one.key])}"
        for one in weaker
        if one.key in sized and one.value != sized[one.key]
    ]
    return [*weaker, *implied, *others], notices


def _overlaid(base: dict[str, Any], settings: list[Setting], problems: list[str]) -> DictConfig:
    whole = OmegaConf.create(base)
    for setting in settings:
        foreign = [text for text in _strings(setting.value) if not _is_allowed(text)]
        if foreign:
            problems.append(
                f"{setting.key}={shown(setting.value)} ({setting.origin}): {foreign[0]} is not"
                " supported; use ${other.key} or ${oc.env:VARIABLE,default}"
            )
            continue
        try:
            OmegaConf.update(whole, setting.key, setting.value, merge=False)
        except (OmegaConfBaseException, IndexError) as error:
            problems.append(_failure(setting, error))
    return whole


def _resolve(
    whole: DictConfig, base: dict[str, Any], setting: Setting, problems: list[str]
) -> None:
    """Resolves the value of `setting` in `whole`, and adds a problem if that fails.

    The recipe's value, from `base`, then takes the place of the setting's.
    """
    try:
        value = OmegaConf.select(whole, setting.key, throw_on_missing=True)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        problems.append(_failure(setting, error))
        group, name = setting.key.split(".")[:2]
        OmegaConf.update(whole, f"{group}.{name}", base[group][name], merge=False)


def _failure(setting: Setting, error: Exception) -> str:
    why = "refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    if setting.value == "???":
        why = "must be given"
    shell = [name for name in _NAME.findall(str(setting.value)) if name in os.environ]
    if isinstance(error, InterpolationKeyError) and shell:
        why += f"; ${{oc.env:{shell[0]}}} is the variable of the shell"
    return f"{setting.key}={shown(setting.value)} ({setting.origin}): {why}"


def _strings(value: object) -> Iterator[str]:
    """Every text inside `value`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(name)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _is_allowed(text: str) -> bool:
    """Whether all interpolations in `text`, nested ones included, are of the two allowed kinds."""
    # The brace stays, so that nothing escaped passes inside an interpolation: OmegaConf counts
    # backslashes differently there.
    text = _ESCAPED.sub(r"\\{", text)
    replaced = 1
    while replaced:
        text, replaced = _ALLOWED.subn("x", text)
    return "${" not in text
