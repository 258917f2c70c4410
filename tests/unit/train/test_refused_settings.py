"""Each key whose change a resume refuses is named by its error; nothing is trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum
from typing import Any, get_args

import pytest

from dit.config import (
    Balance,
    BlendEntry,
    MockGeometry,
    ObjectiveName,
    ParameterGroup,
    Problems,
    RngConfig,
    RunConfig,
    TextPadding,
)
from dit.config.inlining import field_types, value_of
from dit.config.loading.schema import schema_of
from dit.config.resume import Resume
from dit.data import DataError
from dit.data.loader_state import check_identity, loader_identity, places_of
from dit.models.family import families
from dit.train.checkpoint import state_dict
from dit.train.checkpoint.paths import CheckpointError

BASES = {one.name: RunConfig(model=one.default()) for one in families()}
OTHER: dict[str, Any] = {
    "objective.level_range": (0.5, 1.0),
    "objective.given_frames": (1.0, 2.0),
    "model.text_pad_to": TextPadding.STORED,
    "lora.targets": ("attention",),
    "optimizer.groups": (ParameterGroup(pattern="*", lr=1.0),),
}
"""Values of keys for which none is found by trying."""
WITH: dict[str, dict[str, Any]] = {
    "objective.huber_c": {"objective.loss": "huber"},
    "objective.level_range": {"objective.name": ObjectiveName.FLOW},
    "lora.plus_ratio": {"lora.rank": 4},
    "model.qk_norm": {},
}
"""Other settings that a key needs to have a meaning, before and after."""


def changed(group: Any, key: str, value: Any) -> Any:
    """The group with another value of a key, which may lie in an inlined group."""
    if key in (f.name for f in fields(group)):
        return replace(group, **{key: value})
    outer = next(f.name for f in fields(group) if f.metadata.get("inlined") and key in
                 field_types(type(getattr(group, f.name))))
    return replace(group, **{outer: changed(getattr(group, outer), key, value)})


def with_value(config: RunConfig, key: str, value: Any) -> RunConfig:
    group, _, name = key.partition(".")
    return replace(config, **{group: changed(getattr(config, group), name, value)})


def other_values(kind: Any, now: Any) -> Iterator[Any]:
    """Values that a key of a type may have instead."""
    kinds = [kind, *get_args(kind)]
    if isinstance(now, bool):
        yield not now
    elif isinstance(now, int | float):
        yield from (now * 2, now / 2, now + 1, now - 1, now * 4)
    elif isinstance(now, tuple):
        yield from ((*now[:-1], part) for part in (now[-1] * 2, now[-1] + 1))
    for one in kinds:
        if isinstance(one, type) and issubclass(one, Enum):
            yield from (member for member in one if member is not now)
    if now is None:
        yield from (value for value in (4, 0.5, "a") if type(value) in kinds)


def another(config: RunConfig, key: str) -> RunConfig:
    """The configuration with another value of a key that is valid."""
    group, _, name = key.partition(".")
    now = value_of(getattr(config, group), name)
    tried = [OTHER[key]] if key in OTHER else []
    for value in (*tried, *other_values(schema_of(config).type_of(key), now)):
        value = int(value) if type(now) is int and value == int(value) else value
        try:
            return with_value(config, key, value)
        except (Problems, ValueError, TypeError, ZeroDivisionError):
            continue
    raise AssertionError(f"no other value of {key} is found: write one into OTHER")
