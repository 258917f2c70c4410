"""What keeps a checkpoint from being converted."""

from __future__ import annotations

from collections.abc import Iterable


class ConvertError(ValueError):
    """A checkpoint that cannot be converted, and what to do about it."""


def listed(names: Iterable[str], *, most: int = 20) -> str:
    """Names in one line; of a long list the first ones and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
