"""Recipe, YAML file and command line are loaded as one checked `RunConfig`, and written as YAML.

1. read    both sources become settings                       (settings.py)
2. choose  the model family, which decides what keys `model` has
3. sort    known and unknown keys
4. merge   known keys over the recipe's values                (settings.py)
5. check   types, then every group's own rules                (validate.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from dit.config import ModelConfig, ObjectiveConfig, Problems, RunConfig
from dit.config_loading.schema import Schema, hints, is_group, path_keys, record_type, schema_of
from dit.config_loading.settings import (
    Setting,
    escaped,
    legible,
    merge,
    named,
    read_file,
    read_tokens,
    shown,
    value_of,
)
from dit.config_loading.validate import checked_config, plain, plain_group, read_paths, unused
from dit.local_path import PathError
from dit.models.family import Family
from dit.models.registry import default_family, families, family_named, family_of_size

NO_GUESS = (
    "--help lists all flags, docs/configuration.md all keys, and docs/coming_from.md those of other"
    " tools"
)

logger = logging.getLogger(__name__)


class ForWeights(NamedTuple):
    """Network and objective of the weights from which a run starts."""

    model: ModelConfig
    objective: ObjectiveConfig
    stated: frozenset[str]
    """Keys of `objective` that are stored with the weights; `model.name` does not override them."""
    place: str
    """Where the weights are, as a phrase for messages."""


Adapt = Callable[[RunConfig, Callable[..., Any]], ForWeights | None]
"""Function (recipe, lookup of the user's settings) -> network and objective of the weights from
which the run starts; None if it starts from no weights."""


class ConfigError(Problems):
    """All problems of a configuration, one line each, found before any work starts."""

    def __init__(self, problems: list[str]):
        problems = [legible(problem) for problem in problems]
        super().__init__(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        self.args = ("\n  - ".join([f"{count} in the configuration:", *problems]),)


def load_config(
    recipe: RunConfig,
    *,
    config_file: Path | None = None,
    overrides: Sequence[str] = (),
    settings: Sequence[Setting] = (),
    adapt: Adapt | None = None,
    saved: bool = False,
) -> RunConfig:
    """The recipe's configuration with the changes of a YAML file, then those of a command line.

    `overrides` takes the tokens of a command line: `a.b=c`, `+a.b=c`, `~a.b` (back to the recipe's
    value), `--a.b c`, `--a.b=c`; values are YAML. `settings` rank between file and command line.
    `adapt` may replace the recipe's network and objective by those of the weights from which the
    run starts; whatever a person has set overrides them. `saved` says that `config_file` is a
    configuration that `save_config` wrote: its paths are resolved already, and unused keys are not
    logged.

    Raises:
        ConfigError: with every problem found, each naming key, value, place and remedy.
    """
    problems, settings = list[str](), [*settings]
    try:
        settings = [*(read_file(config_file).settings() if config_file else ()), *settings]
    except Problems as error:
        problems += error.problems
    from_tokens, wrong_tokens = read_tokens(overrides)
    problems += wrong_tokens
    settings += from_tokens
    base, stated = plain(recipe), frozenset[str]()
    given = partial(_given, base, settings, schema_of(recipe))
    told = None if adapt is None else adapt(recipe, given)
    if told is not None:
        base |= {"model": plain_group(told.model), "objective": plain_group(told.objective)}
        stated = frozenset(f"objective.{key}" for key in told.stated)
    family = _chosen_family(base, settings, problems)
    if told is not None and family.name != told.model.family:
        raise ConfigError([*problems, _of_another_family(told, family, base, settings)])
    schema = Schema(family.config)
    if family.name != base["model"]["family"]:
        base["model"] = plain_group(family.default())
        base["objective"] |= family.objective.settings
        if value_of("model.name", base, settings) is None:
            base["objective"] |= family.objective.of_size.get(family.default().name, {})
    sizes = {
        size: {key: value for key, value in keys.items() if key not in stated}
        for size, keys in family.keys_of_sizes.items()
    }
    merged = merge(base, _sort(settings, schema, problems), sizes)
    problems += [] if saved else read_paths(merged, schema)
    config, wrong = checked_config(merged, base, schema)
    problems += [*merged.problems, *wrong]
    if problems or config is None:
        raise ConfigError(problems)
    for notice in [*([] if saved else unused(config, merged, base)), *merged.notices]:
        logger.warning(legible(notice))
    return config


def _given(
    base: dict[str, Any],
    settings: list[Setting],
    schema: Schema,
    key: str,
    otherwise: Any = None,
) -> Any:
    """The value that the user set for `key` of a group other than `model`, or `otherwise`.

    Raises:
        ConfigError: the value is a path that cannot be used here.
    """
    found = value_of(key, base, settings)
    if found is None:
        return otherwise
    group, _, name = key.partition(".")
    read = path_keys(schema.groups[group]).get(name)
    if read is None or not isinstance(found.value, str):
        return found.value
    try:
        return read(found.value)
    except PathError as error:
        raise ConfigError([f"{key} ({found.origin}): {error}"]) from None


def _chosen_family(base: dict[str, Any], settings: list[Setting], problems: list[str]) -> Family:
    """The family named by `model.family`, by the size in `model.name`, or else by the recipe.

    Raises:
        ConfigError: there is no such family, or `model.family` and `model.name` name different
            families; no other key can be read then.
    """
    named, size = (value_of(key, base, settings) for key in ("model.family", "model.name"))
    try:
        family = family_named(str(named.value) if named else base["model"]["family"])
        other = family_of_size(str(size.value), first=family.name) if size else None
    except Problems as error:
        where = f" ({named.origin})" if named else ""
        raise ConfigError([*problems, *(f"{text}{where}" for text in error.problems)]) from None
    if size is None or other is None or other is family:
        return family
    if named is None:
        return other
    raise ConfigError(
        [
            *problems,
            f"model.name={size.value} ({size.origin}) is a size of family {other.name}, and"
            f" model.family={family.name} ({named.origin}); leave one of them out",
        ]
    )


def _of_another_family(
    told: ForWeights, family: Family, base: dict[str, Any], settings: list[Setting]
) -> str:
    """Error message: `settings` name `family`, but the weights are of another family."""
    keys = (value_of(key, base, settings) for key in ("model.family", "model.name"))
    named = ", ".join(f"{one.key}={one.value} ({one.origin})" for one in keys if one is not None)
    return (
        f"{named}: belongs to family {family.name}, and {told.place} holds weights of"
        f" model.family={told.model.family}; leave these keys out, use a file of conf/ for"
        f" {told.model.family}, or load other weights"
    )


def _sort(settings: list[Setting], schema: Schema, problems: list[str]) -> list[Setting]:
    """The settings with known keys; an error for each other one is added to `problems`."""
    known: list[Setting] = []
    for setting in settings:
        if schema.is_known(setting.key):
            wrong = _misplaced(setting, schema)
        else:
            wrong = [_unknown(setting, schema)]
        problems += wrong
        known += [] if wrong else [setting]
    return known


def _unknown(setting: Setting, schema: Schema) -> str:
    key = setting.key
    if other := _of_other_family(key):
        own = ", ".join(name for name in hints(schema.model) if name not in hints(ModelConfig))
        return (
            f"{named(setting)}: is a key of family {other}; model.family={schema.family} has"
            f" {own} instead"
        )
    from dit.foreign.translate import advice  # tables that keys of ours do not need

    if told := advice(setting):
        return f"{named(setting)}: is a key of other tools; {told}"
    guess, leaf = schema.nearest(key), key.rpartition(".")[2]
    if leaf.startswith("_") and leaf.endswith("_"):
        told = "no value names code to run; choose recipes with --recipe"
    else:
        told = f"did you mean {guess}?" if guess else NO_GUESS
    return f"{named(setting)}: unknown key; {told}"


def _of_other_family(key: str) -> str | None:
    """Name of another family that has the `model` key that this run's family lacks; or None."""
    group, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    found = [one.name for one in families() if group == "model" and name in hints(one.config)]
    return found[0] if found else None


def _misplaced(setting: Setting, schema: Schema) -> list[str]:
    """Problems of a setting that gives a group a value, or unknown keys in a list of records."""
    kind = schema.type_of(setting.key)
    if is_group(kind) and not setting.remove:
        example = f"{setting.key}.{next(iter(hints(kind)))}"
        return [f"{named(setting)}: is a group and holds no value; set a key such as {example}"]
    record = record_type(kind)
    if record is None or not isinstance(setting.value, list):
        return []
    return [
        _unknown(replace(setting, key=key, value=value), schema)
        for index, item in enumerate(setting.value)
        if isinstance(item, dict)
        for name, value in item.items()
        if name not in hints(record)
        for key in [f"{setting.key}.{index}.{name}"]
    ]


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML, which `load_config` reads back to an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(plain(config))))


def save_config(config: RunConfig, path: Path) -> None:
    """Writes the whole configuration `config` to the file `path` as YAML."""
    path.write_text(to_yaml(config), encoding="utf-8")


def read_config(path: Path) -> RunConfig:
    """The configuration that `save_config` wrote to `path`.

    Raises:
        ConfigError: the file is missing, or another version of this program wrote it.
    """
    return load_config(default_config(), config_file=path, saved=True)


def default_config() -> RunConfig:
    """The defaults of all groups, with the default network of the default family."""
    return RunConfig(model=default_family().default())


def changes(before: RunConfig, after: RunConfig) -> dict[str, str]:
    """Key -> the text `key old -> new`, for each setting that differs between two configurations.

    A key that only one of two families has is null for the other.
    """
    old, new = plain(before), plain(after)
    keys = dict.fromkeys([*schema_of(before).all_keys(), *schema_of(after).all_keys()])
    pairs = [(key, _at(old, key), _at(new, key)) for key in keys]
    return {key: f"{key} {shown(was)} -> {shown(now)}" for key, was, now in pairs if was != now}


def _at(tree: dict[str, Any], key: str) -> Any:
    group, _, name = key.partition(".")
    return tree[group].get(name)
