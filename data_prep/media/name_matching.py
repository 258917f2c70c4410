"""Matches files to media by name: caption files, masks, control pictures, rows of tables.

é may be one character, or an e followed by an accent, as macOS writes it. Names are compared by
their bytes. Names without a partner are then compared in composed form (NFC, Unicode Standard Annex
#15), and stay unmatched if several names have the same composed form.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

UNCLEAR = "whose name matches several, because é may be one character or two"
"""End of the message that counts ambiguous names."""


def composed(name: str) -> str:
    """`name` in Unicode's composed form (NFC), in which all spellings of a name are equal."""
    return unicodedata.normalize("NFC", name)


def respelled(
    spare: Iterable[str], left: Mapping[str, Collection[str]]
) -> tuple[dict[str, str], set[str]]:
    """Matches names that differ only in Unicode spelling.

    `spare` has the names to match, and `left` their possible partners, by composed form. Returns
    the partner of each matched name, and the set of names whose composed form several names or
    several partners share.
    """
    forms: dict[str, list[str]] = {}
    for name in spare:
        forms.setdefault(composed(name), []).append(name)
    found, unclear = dict[str, str](), set[str]()
    for form, names in forms.items():
        wanted = left.get(form, ())
        if len(names) == len(wanted) == 1:
            found[names[0]] = next(iter(wanted))
        elif wanted:
            unclear.update(names)
    return found, unclear


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched(Generic[T]):
    """Files matched to media by name, and the files without a medium."""

    by_name: Mapping[str, T]
    """All files, by their names in the spelling of the medium that they match."""
    spare: Collection[T]
    """Files whose names match no medium."""
    unclear: Collection[T]
    """Files whose names in composed form match, but not one file to one medium."""


def match(offered: Mapping[str, T], wanted: Callable[[], Iterable[Sequence[str]]]) -> Matched[T]:
    """Matches the files `offered` (by name) to media.

    `wanted` yields the acceptable names of each medium, the best first; it may be called twice.
    """
    spare = set(offered)
    for names in wanted():
        spare.discard(next((name for name in names if name in offered), ""))
    if not spare:
        return Matched(by_name=offered, spare=(), unclear=())
    forms, left = set(map(composed, spare)), dict[str, set[str]]()
    for names in wanted():
        if not any(name in offered for name in names):
            for name in (name for name in names if composed(name) in forms):
                left.setdefault(composed(name), set()).add(name)
                break
    found, unclear = respelled(spare, left)
    return Matched(
        by_name={found.get(name, name): file for name, file in offered.items()},
        spare=[offered[name] for name in spare - unclear - found.keys()],
        unclear=[offered[name] for name in unclear],
    )
