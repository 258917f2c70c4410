"""Validation rules of configuration groups, each with the error message of its violation."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from typing import Any

MOST = 2**31 - 1
"""Largest integer that a key accepts by default: the largest signed 32-bit index."""

Rule = tuple[bool, str]  # whether it holds, and the error message for when it does not


class Problems(ValueError):  # noqa: N818 - it is what it holds
    """All contradictions in a configuration, one line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


def check(*rules: Rule) -> None:
    """Raises `Problems` with the messages of the `rules` that do not hold.

    A message begins with its field. Of each field only the first message is shown, because later
    ones mostly follow from it.
    """
    broken = [message for holds, message in rules if not holds]
    if broken:
        first = {message.partition("=")[0]: message for message in reversed(broken)}
        raise Problems([message for message in broken if message in first.values()])


def numbers(group: Any, **most: float) -> list[Rule]:
    """Rules that the numbers in all fields of `group` are finite in float32 and bounded.

    `most` gives the largest value of a field by name; the default is `MOST` for integers and the
    largest float32 for other numbers. Integers are at least -`MOST`. Put these rules after a
    group's other rules, whose messages are more specific.
    """
    rules: list[Rule] = []
    for one in fields(group):
        value = getattr(group, one.name)
        parts = value if isinstance(value, tuple) else (value,)
        counts = [part for part in parts if isinstance(part, int) and not isinstance(part, bool)]
        reals = [part for part in parts if isinstance(part, float)]
        if not (counts or reals):
            continue
        end = most.get(one.name, MOST if counts else None)
        rules += [
            (
                all(map(_is_float32, reals)),
                f"{one.name}={value} must be finite, and neither too large nor too small for"
                " float32 (1.2e-38 to 3.4e38, or 0)",
            ),
            (
                end is None or not all(map(_is_float32, reals)) or max(counts + reals) <= end,
                f"{one.name}={value} must be at most {end}",
            ),
            (min(counts, default=0) >= -MOST, f"{one.name}={value} must be at least {-MOST}"),
        ]
    return rules


def _is_float32(value: float) -> bool:
    try:
        (narrow,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return False
    return narrow - narrow == 0 and (narrow != 0) == (value != 0)


def within(group: Any, name: str, low: float, high: float) -> Rule:
    """The rule that a number lies in [low, high] or is None; NaN violates it."""
    value = getattr(group, name)
    return (
        value is None or low <= value <= high,
        f"{name}={value} must lie in [{low:.16g}, {high:.16g}]",
    )


def at_least_one(group: object, *names: str) -> list[Rule]:
    """Rules that each named field (each number of a tuple field) is 1 or more, or None."""
    values = {name: getattr(group, name) for name in names}
    return [
        (
            value is None or (min(value) if isinstance(value, tuple) else value) >= 1,
            f"{name}={value} must be at least 1",
        )
        for name, value in values.items()
    ]


def bounded(default: Any, *, most: float, least: int | None = 1) -> Any:
    """A dataclass field with a `default` and bounds for its numbers, which `ModelConfig` checks.

    `most` is the largest value, `least` the smallest: 0 or 1, or None for no lower bound. A
    subclass that redeclares the field with another default keeps the bounds.
    """
    return field(default=default, metadata={"most": most, "least": least})


@cache
def bounds(kind: type) -> dict[str, Mapping[str, Any]]:
    """Bounds `most` and `least` of each field of `kind` that `bounded` declares, by name."""
    bases = (getattr(base, "__dataclass_fields__", {}) for base in reversed(kind.__mro__))
    marked = (one for of_base in bases for one in of_base.values() if "most" in one.metadata)
    return {one.name: one.metadata for one in marked}


def positive(group: object, *names: str) -> list[Rule]:
    """Rules that each named field is above zero or None; NaN violates the rule."""
    values = {name: getattr(group, name) for name in names}
    return [
        (value is None or value > 0, f"{name}={value} must be positive")
        for name, value in values.items()
    ]


def not_negative(group: object, *names: str) -> list[Rule]:
    """Rules that each named field is at least 0 or None; NaN violates the rule."""
    values = {name: getattr(group, name) for name in names}
    return [
        (value is None or value >= 0, f"{name}={value} must not be negative")
        for name, value in values.items()
    ]
