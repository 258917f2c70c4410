"""Recipe, YAML file and command line -> one checked `RunConfig`, and back to YAML.

1. read    both sources become settings                     (settings.py)
2. sort    unknown keys, keys of other stacks, our own keys
3. merge   our own keys over the recipe's values            (merging.py)
4. check   types, then every group's own rules              (checking.py)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from dit.config import Problems, RunConfig
from dit.config.loading.foreign import Foreign, accepts, foreign, is_foreign_group
from dit.config.loading.merge import escaped, legible, merge, shown
from dit.config.loading.overrides import Setting, read_file, read_tokens
from dit.config.loading.schema import hints, is_group, is_known, nearest, record_type, type_of
from dit.config.loading.validate import checked_config, plain

_SECRET = re.compile("api_key|secret|password|token$")
NO_GUESS = "--help lists all flags and keys, and docs/coming_from.md those of other tools"

logger = logging.getLogger(__name__)


class ConfigError(Problems):
    """Everything that is wrong with a configuration, one line each, before any work starts."""

    def __init__(self, problems: list[str]):
        problems = [legible(problem) for problem in problems]
        super().__init__(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        self.args = ("\n  - ".join([f"{count} in the configuration:", *problems]),)


def load_config(
    recipe: RunConfig, *, config_file: Path | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """The recipe's run with the changes of a YAML file, then those of a command line.

    `overrides` takes the tokens of a command line: `a.b=c`, `+a.b=c`, `~a.b` (back to the recipe's
    value), `--a.b c`, `--a.b=c`; values are YAML. Keys that only other stacks know are logged as
    warnings that say what replaces them.

    Raises:
        ConfigError: with every problem found, each naming key, value, place and remedy.
    """
    problems: list[str] = []
    settings: list[Setting] = []
    try:
        settings += read_file(config_file) if config_file else []
    except Problems as error:
        problems += error.problems
    from_tokens, wrong_tokens = read_tokens(overrides)
    problems += wrong_tokens
    ours, notices = _sort([*settings, *from_tokens], problems)

    base = plain(recipe)
    merged = merge(base, ours)
    config, wrong = checked_config(merged, base)
    problems += merged.problems + wrong
    if problems or config is None:
        raise ConfigError(problems)
    for notice in (*notices, *merged.notices):
        logger.warning(legible(notice))
    return config


def _sort(settings: list[Setting], problems: list[str]) -> tuple[list[Setting], list[str]]:
    """The settings of our own keys, and one notice for each key of another stack."""
    ours: list[Setting] = []
    notices: list[tuple[bool, str]] = []
    for setting in _without_removed_foreign(settings):
        entry, known = foreign(setting.key), is_known(setting.key)
        if known and not (entry and isinstance(setting.value, str)):
            wrong = _misplaced(setting)
            problems += wrong
            ours += [] if wrong else [setting]
        elif entry is None:
            problems.append(_unknown(_named(setting), setting.key))
        elif not accepts(entry, setting.value):
            problems.append(f"{_named(setting)}: is not supported: {entry.instead}")
        else:
            read = _read(setting, entry, problems)
            ours += read
            notices.append((entry.grave, _notice(setting, entry, read)))
    # What changes the whole run comes first.
    return ours, [notice for _, notice in sorted(notices, key=lambda one: not one[0])]


def _without_removed_foreign(settings: list[Setting]) -> list[Setting]:
    """Without the keys of other stacks that a later `~key` takes back."""
    kept: list[Setting] = []
    for setting in settings:
        other = foreign(setting.key) is not None or is_foreign_group(setting.key)
        if setting.remove and other and not is_known(setting.key):
            below = f"{setting.key}."
            kept = [one for one in kept if not f"{one.key}.".startswith(below)]
        else:
            kept.append(setting)
    return kept


def _read(setting: Setting, entry: Foreign, problems: list[str]) -> list[Setting]:
    """What a key of another stack says in keys of ours; null says nothing."""
    if entry.reading is None or setting.value is None:
        return []
    try:
        values = entry.reading(setting.value)
    except ValueError as error:
        problems.append(f"{_named(setting)}: {error}")
        return []
    origin = f"{setting.key}, {setting.origin}"
    return [replace(setting, key=key, value=value, origin=origin) for key, value in values.items()]


def _notice(setting: Setting, entry: Foreign, read: list[Setting]) -> str:
    note = f": {entry.instead}" if entry.instead else ""
    if not read:
        return f"{_named(setting)}: read, not used{note}"
    as_ours = ", ".join(f"{one.key}={shown(one.value)}" for one in read)
    return f"{_named(setting)}: read as {as_ours}{note}"


def _named(setting: Setting) -> str:
    value = '"***"' if _SECRET.search(setting.key) and setting.value else shown(setting.value)
    text = f"~{setting.key}" if setting.remove else f"{setting.key}={value}"
    return f"{text} ({setting.origin})"


def _unknown(named: str, key: str) -> str:
    guess, leaf = nearest(key), key.rpartition(".")[2]
    if leaf.startswith("_") and leaf.endswith("_"):
        advice = "no value names code to run; choose recipes with --recipe"
    else:
        advice = f"did you mean {guess}?" if guess else NO_GUESS
    return f"{named}: unknown key; {advice}"


def _misplaced(setting: Setting) -> list[str]:
    """A group set to one value, or unknown keys inside a list of records."""
    kind = type_of(setting.key)
    if is_group(kind) and not setting.remove:
        example = f"{setting.key}.{next(iter(hints(kind)))}"
        return [f"{_named(setting)}: is a group and holds no value; set a key such as {example}"]
    record = record_type(kind)
    if record is None or not isinstance(setting.value, list):
        return []
    return [
        _unknown(f"{key}={shown(value)} ({setting.origin})", key)
        for index, item in enumerate(setting.value)
        if isinstance(item, dict)
        for name, value in item.items()
        if name not in hints(record)
        for key in [f"{setting.key}.{index}.{name}"]
    ]


def to_yaml(config: RunConfig) -> str:
    """The whole tree as YAML, which `load_config` reads back to an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(plain(config))))


def save_config(config: RunConfig, path: Path) -> None:
    """Writes the whole tree as YAML."""
    path.write_text(to_yaml(config), encoding="utf-8")


def read_config(path: Path) -> RunConfig:
    """Reads what `save_config` wrote.

    Raises:
        ConfigError: the file is missing, or another version of this program wrote it.
    """
    return load_config(RunConfig(), config_file=path)
