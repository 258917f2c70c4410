"""Plain values become a checked `RunConfig`, or all their problems are reported at once.

Pydantic checks the types of each group and runs the group's own checks; checks of several groups
run when all groups are right. A group with wrong types is not checked further in that pass. So
wrong values are replaced by the recipe's, and the tree is checked again, until no new problem
appears.

`check_trainable`, `check_objective_inputs` and `check_streams` refuse options that the network
cannot have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dit.config import (
    LoraStreams,
    ModelConfig,
    ObjectiveConfig,
    ObjectiveName,
    OptimizerKind,
    Problems,
    RunConfig,
    ValidationConfig,
)
from dit.config.checks import Rule, check
from dit.config_loading.dependencies import missing
from dit.config_loading.schema import (
    Schema,
    expected,
    hints,
    is_group,
    item_type,
    path_keys,
    record_type,
)
from dit.config_loading.settings import Merged, shown
from dit.local_path import PathError, not_none
from dit.models.family import InputKind, NullInput
from dit.models.registry import family_of, has_sound

RECIPE = "recipe"
"""Origin of values that the user did not set."""
KeyPath = tuple[int | str, ...]  # where in the tree, as ("dataset", "mock_samples", 0, "width")


@cache
def _adapter(group: type) -> TypeAdapter[Any]:
    return TypeAdapter(group)


def plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dicts, with enums as text and tuples as lists, as in YAML."""
    return {one.name: plain_group(getattr(config, one.name)) for one in fields(config)}


def plain_group(group: Any) -> dict[str, Any]:
    """The dataclass `group` as a dict of plain values, as in YAML, in the order of files."""
    kind = type(group)
    values = _adapter(kind).dump_python(group, mode="json")
    return {name: values[name] for name in hints(kind)}


def checked_config(
    merged: Merged, base: dict[str, Any], schema: Schema
) -> tuple[RunConfig | None, list[str]]:
    """Checks the tree in `merged`; returns (configuration, problems).

    The configuration is None if there are problems. `base` has the recipe's values, which replace
    wrong values so that further problems are found.
    """
    tree = deepcopy(merged.tree)
    problems: list[str] = []
    doubtful: list[str] = []  # keys for which the recipe's value stands in
    while True:
        config, found = _checked_once(tree, merged.origins, schema)
        if config is not None:
            return (None if problems else config), problems
        problems += [text for _, text in found if not any(key in text for key in doubtful)]
        replaced = {place[:2] for place, _ in found if place}  # groups and keys
        if not replaced:
            return None, problems
        for place in sorted(replaced, key=str):
            doubtful.append(_stand_in(tree, base, place))


def unused(config: RunConfig, merged: Merged, base: dict[str, Any]) -> list[str]:
    """Lines about changed keys without effect; keys that lack the same setting share a line."""
    found: dict[str, list[str]] = {}
    for key, origin in merged.origins.items():
        group, name = key.split(".")[:2]
        changed = name in base[group] and merged.tree[group][name] != base[group][name]
        lacks = missing(f"{group}.{name}", config) if changed else []
        if lacks and not origin.startswith("model.name="):  # which no person set
            # Without the value, which may be of the environment.
            found.setdefault(" and ".join(lacks), []).append(f"{key} ({origin})")
    if config.optimizer.kind is not OptimizerKind.MUON:
        for index, group in enumerate(config.optimizer.groups):
            if group.kind is not None:
                place = ("optimizer", "groups", index, "kind")
                said = f"{dotted(place)} ({_origin(place, merged.origins)})"
                found.setdefault(f"optimizer.kind={OptimizerKind.MUON}", []).append(said)
    return [f"{', '.join(keys)}: not used without {lacks}" for lacks, keys in found.items()]


def read_paths(merged: Merged, schema: Schema) -> list[str]:
    """Resolves the paths that the user set, by `dit.local_path`, in `merged`; returns the problems.

    The text `None` for a key that may be null is a problem.
    """
    problems: list[str] = []
    for group, kind in schema.groups.items():
        problems += _read_paths(merged.tree[group], kind, (group,), merged.origins)
    return problems


def _read_paths(values: Any, kind: Any, place: KeyPath, origins: dict[str, str]) -> list[str]:
    problems: list[str] = []
    for name, value in values.items() if isinstance(values, dict) else ():
        here, item = (*place, name), hints(kind).get(name)
        if isinstance(value, list) and (record := record_type(item)):
            for index, one in enumerate(value):
                problems += _read_paths(one, record, (*here, index), origins)
        origin = _origin(here, origins)
        if not isinstance(value, str) or item not in (str, str | None) or origin == RECIPE:
            continue
        try:
            values[name] = path_keys(kind).get(name, str if item is str else not_none)(value)
        except PathError as error:
            problems.append(f"{dotted(here)} ({origin}): {error}")
    return problems


def _checked_once(
    tree: dict[str, Any], origins: dict[str, str], schema: Schema
) -> tuple[RunConfig | None, list[tuple[KeyPath, str]]]:
    """(configuration or None, problems); each problem is (path of its key, message)."""
    groups: dict[str, Any] = {}
    found: list[tuple[KeyPath, str]] = []
    for name, kind in schema.groups.items():
        try:
            # JSON mode is strict about types and still takes lists for tuples, text for enums.
            values = json.dumps(tree[name], default=str)
            groups[name] = _adapter(kind).validate_json(values, strict=True)
        except ValidationError as error:
            for details in error.errors():
                place = (name, *details["loc"])
                found += _in_words(details, place, tree, origins, schema)
    if found:
        return None, list(dict.fromkeys(found))  # once, where a key may be of several types
    try:
        config = RunConfig(**groups)
        check_objective_inputs(config)
        check_streams(config)
        return config, []
    except Problems as error:
        return None, [((), _contradiction((), text, origins, schema)) for text in error.problems]


def _stand_in(tree: dict[str, Any], base: dict[str, Any], place: KeyPath) -> str:
    """Replaces the value at `place` in `tree` by the recipe's value.

    Returns the key's name as messages write it.
    """
    *outer, last = place
    _at(tree, tuple(outer))[last] = deepcopy(_at(base, place))
    return f"{last}=" if outer else f"{last}."


def _in_words(
    details: Any, place: KeyPath, tree: dict[str, Any], origins: dict[str, str], schema: Schema
) -> list[tuple[KeyPath, str]]:
    """Messages for a pydantic error, each with the path of its key; a check may have several."""
    if details["type"] != "missing":
        place = _in_tree(place, tree)
    raised = details.get("ctx", {}).get("error")
    if isinstance(raised, Problems):
        return [(place, _contradiction(place, text, origins, schema)) for text in raised.problems]
    lost = place[-1] if details["type"] == "missing" else None
    place = place if lost is None else place[:-1]
    value, kind = _at(tree, place), schema.type_of(".".join(map(str, place)))
    hint = f"; {lost} is missing" if isinstance(lost, str) else _hint(value, kind)
    text = f"{dotted(place)}={shown(value)} ({_origin(place, origins)}): expected {expected(kind)}"
    return [(place, text + hint)]


def dotted(place: Sequence[int | str]) -> str:
    """The key at `place` as users write it, such as `dataset.mock_samples[0].width`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).lstrip(".")


def _in_tree(place: KeyPath, tree: dict[str, Any]) -> KeyPath:
    """`place` up to the first component that pydantic added for an alternative of a type."""
    for length, part in enumerate(place):
        outer = _at(tree, place[:length])
        if isinstance(outer, list) and isinstance(part, int):
            continue
        if not isinstance(outer, dict) or part not in outer:
            return place[:length]
    return place


def _at(tree: Any, place: KeyPath) -> Any:
    for part in place:
        tree = tree[part]
    return tree


def _origin(place: KeyPath, origins: dict[str, str]) -> str:
    """Origin of the value at `place`, of the list or group that contains it, or of a key inside it.

    It is `RECIPE` if the user has set none of these.
    """
    for length in range(len(place), 0, -1):
        outer = ".".join(map(str, place[:length]))
        if outer in origins:
            return origins[outer]
    whole = ".".join(map(str, place))
    inner = [where for key, where in origins.items() if key.startswith(f"{whole}.")]
    return inner[-1] if inner else RECIPE


def _hint(value: object, kind: Any) -> str:
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if expected(kind).startswith("text") and isinstance(value, bool | int | float):
        return "; put it in quotes, on a command line as key='\"...\"'"
    if isinstance(value, str | int | float) and _is_list(kind):
        return f"; write [{value}]"
    if str(value).lower() == "none" and expected(kind).endswith("null"):
        return "; write null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        likely = get_close_matches(str(value).lower(), [str(one.value) for one in kind], n=1)
        return f"; did you mean {likely[0]}?" if likely else ""
    return ""


def _is_list(kind: Any) -> bool:
    """Whether `kind` is a list, of any length, of values that are not dataclasses."""
    item = item_type(kind, 10_000)  # a list of fixed length has none
    return item is not None and not is_group(item)


def _contradiction(place: KeyPath, text: str, origins: dict[str, str], schema: Schema) -> str:
    """The message `text` of a group's rule, with its key and the origins of keys it names."""
    if not place:
        named = dict.fromkeys(re.findall(r"[a-z_]+\.[a-z_]+", text))
        known = {key: origins[key] for key in named if key in origins}
    else:
        prefix = ".".join(map(str, place))
        kind = schema.type_of(prefix)
        words = re.findall(r"\w+", text)
        names = [name for name in hints(kind) if name in words] if is_group(kind) else []
        keys = {name: (*place, name) for name in names}
        known = {name: _origin(key, origins) for name, key in keys.items()}
        text = f"{dotted(place)}: {text}"
    where = ", ".join(f"{name} from {origin}" for name, origin in known.items())
    return f"{text} [{where}]" if where else text


def check_trainable(model: ModelConfig) -> None:
    """Raises `Problems` if `model` can only generate; the message names the key."""
    family = family_of(model)
    check(
        (
            family.trains_step_end or not family.tells_step_end(model),
            "model.use_meanflow=true: the network was distilled to predict the mean velocity of"
            " whole steps (mean flow), which no objective here teaches; train the network that it"
            " was distilled from, and generate with this one",
        )
    )


def check_objective_inputs(config: RunConfig) -> None:
    """Raises `Problems` for options of objective and validation that do not fit the network.

    These options are about conditions (given frames, image, guidance embedding, references) and
    sampling steps.
    """
    wanted, family = config.objective, family_of(config.model)
    inputs = family.inputs(config.model)
    frames = [one for one in inputs if one.kind is InputKind.FRAMES]
    which = f"the network (model.family={family.name}, model.name={config.model.name})"
    if not frames:
        why = f"{which} takes no given frames; leave it out"
    else:
        why = f"{which} needs `{frames[0].name}` of every sample; leave it out"
    shown = frames or [one for one in inputs if one.kind is InputKind.FRAME_CHANNELS]
    optional = any(not one.required for one in shown)
    of_image = any(one.kind is InputKind.CHANNELS or one.null is NullInput.KEPT for one in inputs)
    p, counts = wanted.image_condition_probability, wanted.given_frames
    usual, told = family.guidance(config.model), wanted.guidance
    check(
        _steps_of_samples(config),
        _scale_of_references(config.validation, config.model),
        (
            usual is None or told is not None,
            f"objective.guidance=null: {which} has a guidance embedding; set the scale to {usual},"
            " or to that for which the weights were distilled",
        ),
        (
            usual is not None or told is None,
            f"objective.guidance={told}: {which} has no guidance embedding; leave it out",
        ),
        (p == 1 or optional, f"objective.image_condition_probability={p}: {why}"),
        (
            counts is None or (optional and bool(frames)) or has_sound(config.model),
            f"objective.given_frames={list(counts or ())}: {why}",
        ),
        (
            wanted.image_dropout == 0 or of_image,
            f"objective.image_dropout={wanted.image_dropout}: {which} takes no condition channels"
            " and no image rows; leave it out",
        ),
    )


def check_streams(config: RunConfig) -> None:
    """Raises `Problems` for sound options without a sound network, and options that sound excludes.

    The network's own rules check parallel layouts, such as ring attention.
    """
    wanted, usual, model = config.objective, ObjectiveConfig(), config.model
    family, streams = family_of(model), config.lora.streams
    check(
        (
            streams is LoraStreams.BOTH or bool(family.weights.sound),
            f"lora.streams={streams}: the network (model.family={family.name}) has no sound; leave"
            " it out",
        )
    )
    if not has_sound(model):
        own = ("levels", "weight", "given", "prefix")
        names = [*(f"sound_{name}" for name in own), "video_given", "given_text_dropout"]
        check(
            *(
                (
                    getattr(wanted, name) == getattr(usual, name),
                    f"objective.{name}={getattr(wanted, name)}: the network (model.family="
                    f"{family.name}) has no sound; leave it out, or set model.family=sound_dit",
                )
                for name in names
            )
        )
        return
    refused = {
        f"objective.name={wanted.name}": wanted.name != ObjectiveName.FLOW,
        f"objective.preference={wanted.preference}": wanted.preference is not None,
        f"objective.cfg_target={wanted.cfg_target}": wanted.cfg_target is not None,
        f"objective.drift_weight={wanted.drift_weight:g}": wanted.drift_weight > 0,
        f"distill.method={config.distill.method}": config.distill.method is not None,
        "validation.fixed_levels=true": config.validation.fixed_levels,
    }
    check(
        (
            wanted.levels_a_sample == 1,
            f"objective.second_level_rate={wanted.second_level_rate:g} divides a sample's frames"
            " into two sets that do not see each other, and only one would have the sound; set it"
            " to 0 (docs/sound.md)",
        ),
        *(
            (
                not chosen,
                f"{said} needs a network with one stream of tokens, and model.family={family.name}"
                " has two, of frames and of sound; leave it out (docs/sound.md)",
            )
            for said, chosen in refused.items()
        ),
    )


def _steps_of_samples(config: RunConfig) -> Rule:
    """The rule that validation samples take a step for each of `objective.sampling_timesteps`."""
    wanted, steps = config.objective.sampling_timesteps, config.validation_sampling.steps
    count = steps if wanted is None else len(wanted)
    return (
        not config.validation.samples or count == steps,
        f"validation.sampling_steps={steps}: objective.sampling_timesteps has"
        f" {count} timesteps, one for each step; set validation.sampling_steps={count}",
    )


def _scale_of_references(validation: ValidationConfig, model: ModelConfig) -> Rule:
    """The rule that a guidance scale for references needs a network with references."""
    scale = validation.reference_guidance
    unused = family_of(model).unguided_by_references(model)
    return (
        scale == 1 or not unused,
        f"validation.reference_guidance={scale:g}: {unused}; leave it out",
    )
