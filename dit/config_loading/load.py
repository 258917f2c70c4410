"""Recipe, YAML file and command line -> one checked `RunConfig`, and back to YAML.

1. read    both sources become settings                       (settings.py)
2. choose  the model family, which decides what keys `model` has
3. sort    unknown keys, keys of other stacks, our own keys
4. merge   our own keys over the recipe's values              (settings.py)
5. check   types, then every group's own rules                (validate.py)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf

from dit.config import ModelConfig, ObjectiveConfig, Problems, RunConfig
from dit.config_loading.schema import Schema, hints, is_group, path_keys, record_type, schema_of
from dit.config_loading.settings import (
    Setting,
    escaped,
    legible,
    merge,
    read_file,
    read_tokens,
    shown,
    value_of,
)
from dit.config_loading.validate import checked_config, plain, plain_group, read_paths, unused
from dit.local_path import PathError
from dit.models.family import Family
from dit.models.registry import default_family, families, family_named, family_of_size

if TYPE_CHECKING:
    from dit.config_loading.foreign import Foreign

_SECRET = re.compile("api_key|secret|password|token$")
NO_GUESS = (
    "--help lists all flags, docs/configuration.md all keys, and docs/coming_from.md those of other"
    " tools"
)

logger = logging.getLogger(__name__)


class ForWeights(NamedTuple):
    """The network of weights that a run starts from, and what they were trained for."""

    model: ModelConfig
    objective: ObjectiveConfig
    stated: frozenset[str]
    """Keys of `objective` that lie beside the weights, so that no `model.name` implies them."""
    place: str
    """Where the weights are, in words."""


Notice = Callable[[RunConfig], str]
"""A line for the log about a key, once the run is known."""
Adapt = Callable[[RunConfig, Callable[..., Any]], ForWeights | None]
"""(recipe, (key, otherwise) -> what a person set it to) -> what replaces the recipe's own."""


class ConfigError(Problems):
    """Everything that is wrong with a configuration, one line each, before any work starts."""

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
    adapt: Adapt | None = None,
    saved: bool = False,
) -> RunConfig:
    """The recipe's run with the changes of a YAML file, then those of a command line.

    `overrides` takes the tokens of a command line: `a.b=c`, `+a.b=c`, `~a.b` (back to the recipe's
    value), `--a.b c`, `--a.b=c`; values are YAML. Keys that only other stacks know are logged as
    warnings that say what replaces them. `adapt` may replace the recipe's network and
    objective by those of weights to start from, below all that a person has set. Paths are read by
    `dit.local_path`, unless the file is a `saved` one, whose paths are those of its run.

    Raises:
        ConfigError: with every problem found, each naming key, value, place and remedy.
    """
    problems, settings = list[str](), list[Setting]()
    try:
        settings += read_file(config_file) if config_file else []
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
    checked = partial(_checked, base, settings, sizes, schema, saved=saved)
    found = _where_legal(checked)
    problems += found.problems
    if problems or found.config is None:
        raise ConfigError(problems)
    for notice in found.notices:
        logger.warning(legible(notice))
    return found.config


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checked:
    """What settings make of a recipe."""

    config: RunConfig | None  # None where there are problems
    notices: list[str]
    problems: list[str]
    optional: frozenset[str]
    """Our keys that keys of other tools set as far as the run can take them."""


def _where_legal(checked: Callable[..., _Checked]) -> _Checked:
    """Without what keys of other tools ask for and this run cannot take, as theirs may not."""
    found, unset = checked(), dict[str, str]()
    for key in sorted(found.optional) if found.problems else ():
        without = checked(unset={**unset, key: ""})
        if len(without.problems) < len(found.problems):
            wrong = [problem for problem in found.problems if problem not in without.problems]
            unset[key] = f"{key} is not set, for {'; '.join(wrong)}"
            found = checked(unset=unset)
    return found


def _checked(
    base: dict[str, Any],
    settings: list[Setting],
    sizes: Mapping[str, Mapping[str, Any]],
    schema: Schema,
    *,
    saved: bool,
    unset: Mapping[str, str] | None = None,
) -> _Checked:
    """`sizes`: the keys that each `model.name` implies.

    `unset`: those of `optional` that are not to be set, and why.
    """
    problems: list[str] = []
    ours, notices, optional = _sort(settings, schema, problems, unset or {})
    merged = merge(base, ours, sizes)
    problems += [] if saved else read_paths(merged, schema)
    config, wrong = checked_config(merged, base, schema)
    said = [notice(config) for notice in notices] if config is not None else []
    said += unused(config, merged, base) if config is not None and not saved else []
    wrong += _refused_by(config, settings, schema) if config is not None else []
    return _Checked(
        config=config,
        notices=[*said, *merged.notices],
        problems=[*problems, *merged.problems, *wrong],
        optional=optional,
    )


def _given(
    base: dict[str, Any],
    settings: list[Setting],
    schema: Schema,
    key: str,
    otherwise: Any = None,
) -> Any:
    """What a person set a key of a common group to.

    Raises:
        ConfigError: it is a path that cannot be read.
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
    """The family that `model.family` names, or that has the size `model.name`, or the recipe's.

    Raises:
        ConfigError: there is no such family, or the two disagree; no other key can be read then.
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
    """That a person asks for another family than that of the weights."""
    keys = (value_of(key, base, settings) for key in ("model.family", "model.name"))
    named = ", ".join(f"{one.key}={one.value} ({one.origin})" for one in keys if one is not None)
    return (
        f"{named}: of family {family.name}, and {told.place} holds weights of"
        f" model.family={told.model.family}; leave these keys out, take a file of conf/ for"
        f" {told.model.family}, or other weights"
    )


def _foreign(key: str) -> Foreign | None:
    """What stands for a key of another tool, whose tables are not read for keys of ours."""
    from dit.config_loading.foreign import foreign

    return foreign(key)


def _sort(
    settings: list[Setting], schema: Schema, problems: list[str], unset: Mapping[str, str]
) -> tuple[list[Setting], list[Notice], frozenset[str]]:
    """The settings of our own keys, one notice for each key of another stack, and `optional`."""
    ours: list[Setting] = []
    notices: list[tuple[bool, Notice]] = []
    optional: set[str] = set()
    kept = _with_blocks(_without_removed_foreign(settings, schema), schema)
    values = {setting.key: setting.value for setting in kept}  # the last, which is the strongest
    for setting in kept:
        known = schema.is_known(setting.key)
        # A text for a group, such as the name of a dataset's file, may be another tool's.
        theirs = isinstance(setting.value, str) and schema.is_known_group(setting.key)
        entry = _foreign(setting.key) if theirs or not known else None
        if known and entry is None:
            wrong = _misplaced(setting, schema)
            problems += wrong
            ours += [] if wrong else [setting]
        elif entry is None:
            problems.append(_unknown(_named(setting), setting.key, schema))
        elif not entry.takes(setting.value):
            problems.append(f"{_named(setting)}: is not supported: {entry.instead}")
        else:
            read = _read(setting, entry, values, problems)
            optional |= {one.key for one in read if entry.where_legal}
            left = [unset[one.key] for one in read if entry.where_legal and one.key in unset]
            read = [] if left else read
            ours += read
            notices.append((entry.grave, partial(_notice, setting, entry, read, left)))
    # What changes the whole run comes first.
    said = [notice for _, notice in sorted(notices, key=lambda one: not one[0])]
    return ours, said, frozenset(optional)


def _with_blocks(settings: list[Setting], schema: Schema) -> list[Setting]:
    """And, before them, one setting for each group of another stack that has a meaning itself."""
    blocks: dict[str, Setting] = {}
    for setting in settings:
        group, dot, name = setting.key.partition(".")
        entry = _foreign(group) if dot and not schema.is_known(group) else None
        if entry is not None and entry.of_block:
            whole = blocks.get(group, replace(setting, key=group, value={}))
            blocks[group] = replace(whole, value=whole.value | {name: setting.value})
    return [*blocks.values(), *settings]


def _refused_by(config: RunConfig, settings: list[Setting], schema: Schema) -> list[str]:
    """Problems of keys of other tools that ask for another run than this one."""
    found = []
    for setting in _without_removed_foreign(settings, schema):
        entry = None if schema.is_known(setting.key) else _foreign(setting.key)
        if entry is not None and entry.refused is not None and setting.value is not None:
            why = entry.refused(setting.value, config)
            found += [f"{_named(setting)}: {why}"] if why else []
    return found


def _without_removed_foreign(settings: list[Setting], schema: Schema) -> list[Setting]:
    """Without the keys of other stacks that a later `~key` takes back."""
    kept: list[Setting] = []
    for setting in settings:
        if setting.remove and not schema.is_known(setting.key) and _is_foreign(setting.key):
            below = f"{setting.key}."
            kept = [one for one in kept if not f"{one.key}.".startswith(below)]
        else:
            kept.append(setting)
    return kept


def _is_foreign(key: str) -> bool:
    from dit.config_loading.foreign import is_foreign_group

    return _foreign(key) is not None or is_foreign_group(key)


def _read(
    setting: Setting, entry: Foreign, all_values: Mapping[str, Any], problems: list[str]
) -> list[Setting]:
    """What a key of another stack says in keys of ours; null says nothing."""
    if setting.value is None:
        return []
    try:
        if entry.joint is not None:
            values = entry.joint(all_values)
        else:
            values = entry.reading(setting.value) if entry.reading is not None else {}
    except ValueError as error:
        problems.append(f"{_named(setting)}: {error}")
        return []
    origin = f"{setting.key}, {setting.origin}"
    return [replace(setting, key=key, value=value, origin=origin) for key, value in values.items()]


def _notice(
    setting: Setting, entry: Foreign, read: list[Setting], left: list[str], config: RunConfig
) -> str:
    """What a key is read as; `left` has the reasons why it is not read as what it could be."""
    if entry.of_run is not None and setting.value is not None:
        return f"{_named(setting)}: {entry.of_run(setting.value, config)}"
    notes = "; ".join(text for text in (entry.instead, *left) if text)
    note = f": {notes}" if notes else ""
    if not read:
        return f"{_named(setting)}: read, not used{note}"
    as_ours = ", ".join(f"{one.key}={shown(one.value)}" for one in read)
    return f"{_named(setting)}: read as {as_ours}{note}"


def _named(setting: Setting) -> str:
    value = '"***"' if _SECRET.search(setting.key) and setting.value else shown(setting.value)
    text = f"~{setting.key}" if setting.remove else f"{setting.key}={value}"
    return f"{text} ({setting.origin})"


def _unknown(named: str, key: str, schema: Schema) -> str:
    if other := _of_other_family(key):
        own = ", ".join(name for name in hints(schema.model) if name not in hints(ModelConfig))
        return f"{named}: is of family {other}, and model.family={schema.family} has {own} instead"
    guess, leaf = schema.nearest(key), key.rpartition(".")[2]
    if leaf.startswith("_") and leaf.endswith("_"):
        advice = "no value names code to run; choose recipes with --recipe"
    else:
        advice = f"did you mean {guess}?" if guess else NO_GUESS
    return f"{named}: unknown key; {advice}"


def _of_other_family(key: str) -> str | None:
    """The family whose configuration has a key that this one lacks."""
    group, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    found = [one.name for one in families() if group == "model" and name in hints(one.config)]
    return found[0] if found else None


def _misplaced(setting: Setting, schema: Schema) -> list[str]:
    """A group set to one value, or unknown keys inside a list of records."""
    kind = schema.type_of(setting.key)
    if is_group(kind) and not setting.remove:
        example = f"{setting.key}.{next(iter(hints(kind)))}"
        return [f"{_named(setting)}: is a group and holds no value; set a key such as {example}"]
    record = record_type(kind)
    if record is None or not isinstance(setting.value, list):
        return []
    return [
        _unknown(f"{key}={shown(value)} ({setting.origin})", key, schema)
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
    return load_config(default_config(), config_file=path, saved=True)


def default_config() -> RunConfig:
    """The defaults of all groups, with the default network of the default family."""
    return RunConfig(model=default_family().default())


def changes(before: RunConfig, after: RunConfig) -> dict[str, str]:
    """Key -> `key old -> new` of each setting that differs; null where a family has no such key."""
    old, new = plain(before), plain(after)
    keys = dict.fromkeys([*schema_of(before).all_keys(), *schema_of(after).all_keys()])
    pairs = [(key, _at(old, key), _at(new, key)) for key in keys]
    return {key: f"{key} {shown(was)} -> {shown(now)}" for key, was, now in pairs if was != now}


def _at(tree: dict[str, Any], key: str) -> Any:
    group, _, name = key.partition(".")
    return tree[group].get(name)
