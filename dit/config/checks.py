"""Rules that a group of options must keep, each with the sentence for when it does not."""

from __future__ import annotations

Rule = tuple[bool, str]  # whether it holds, and what to say when it does not


class Problems(ValueError):  # noqa: N818 - it is what it holds
    """Every contradiction found in a configuration, one line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


def check(*rules: Rule) -> None:
    """Raises `Problems` with the message of every rule that does not hold."""
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise Problems(broken)


def at_least_one(group: object, *names: str) -> list[Rule]:
    """Rules that the named fields are 1 or more."""
    values = {name: getattr(group, name) for name in names}
    return [(value >= 1, f"{name}={value} must be at least 1") for name, value in values.items()]


def positive(group: object, *names: str) -> list[Rule]:
    """Rules that the named fields are above zero, which NaN is not."""
    values = {name: getattr(group, name) for name in names}
    return [
        (value is None or value > 0, f"{name}={value} must be positive")
        for name, value in values.items()
    ]


def given(group: object, *names: str) -> list[str]:
    """Those of the named fields that are not None."""
    return [name for name in names if getattr(group, name) is not None]
