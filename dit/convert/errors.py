"""The error of this folder, in a module without imports of ours, because all others raise it."""

from __future__ import annotations

from collections.abc import Iterable


class ConvertError(ValueError):
    """A checkpoint cannot be converted; the message says why, and the remedy."""


def listed(names: Iterable[str], *, most: int = 20) -> str:
    """Names in one line; a long list is cut, with the number of names left out."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
