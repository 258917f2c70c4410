"""Captions -> labels of a picture: plain text, in fonts that have its characters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import fill
from unicodedata import category, east_asian_width

USUAL = "DejaVu Sans"
"""Comes with matplotlib, and has most alphabets."""
_LINE, _LINES = 40, 3
_CONTROL, _FORMAT = "Cc", "Cf"  # Unicode's categories


@dataclass(frozen=True, kw_only=True, slots=True)
class Fonts:
    """Names of fonts, the first that has a character draws it; and what none of them has."""

    families: tuple[str, ...]
    missing: frozenset[str]


def shortened(caption: str) -> str:
    """Its first three lines of a label, without what draws nothing or turns the line round.

    Control characters stand as code points: some fonts have pictures of boxes for them.
    """
    plain = re.sub(r"\s+", " ", caption[: 50 * _LINE]).strip()
    plain = _each_spelled(plain, {one for one in plain if category(one) == _CONTROL})
    # Left-to-right marks, joiners of emoji and variation selectors.
    plain = "".join(one for one in plain if category(one) != _FORMAT and not _selects(one))
    most = _width(plain) * _LINES
    return plain if len(plain) <= most else plain[: most - 3].rstrip() + "..."


def label(caption: str, fonts: Fonts) -> str:
    """The lines of a label; a character that no font has is its code point."""
    text = _each_spelled(shortened(caption), fonts.missing)
    width = _width(text)
    most = width * _LINES
    return fill(text if len(text) <= most else text[: most - 3] + "...", width=width)


def _width(text: str) -> int:
    """Characters of a line: half as many where they are twice as wide."""
    return _LINE // 2 if any(east_asian_width(one) in "WF" for one in text) else _LINE


def _each_spelled(text: str, characters: Collection[str]) -> str:
    """With code points as words in place of the characters."""
    spelled = (f" U+{ord(one):04X} " if one in characters else one for one in text)
    return " ".join("".join(spelled).split())


def _selects(character: str) -> bool:
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"


def fonts_for(captions: Iterable[str], *, installed: Sequence[str] | None = None) -> Fonts:
    """The usual font, and of those on this machine as few as have what it lacks.

    `installed` are files of fonts; None asks the system.
    """
    from matplotlib.font_manager import findfont, findSystemFonts, get_font

    wanted = {one for caption in captions for one in shortened(caption) if one != " "}
    usual = get_font(findfont(USUAL))
    missing = {one for one in wanted if not usual.get_char_index(ord(one))}
    families, has = [USUAL], {}
    if missing:
        has = _coverage(missing, findSystemFonts() if installed is None else installed)
    while any(has.values()) and missing:
        path = max(sorted(has), key=lambda path: len(has[path]))
        if family := _added(path):
            families.append(family)
            missing -= has[path]
        has = {other: having & missing for other, having in has.items() if other != path}
    return Fonts(families=tuple(families), missing=frozenset(missing))


def _coverage(characters: set[str], files: Sequence[str]) -> dict[str, set[str]]:
    """Files of fonts, and which of the characters each has."""
    from matplotlib.font_manager import get_font

    found = {}
    for path in files:
        try:
            font = get_font(path)
        except (OSError, RuntimeError, ValueError):  # matplotlib's words for a damaged file
            continue
        found[path] = {one for one in characters if font.get_char_index(ord(one))}
    return found


@cache
def _added(path: str) -> str | None:
    """The name by which matplotlib knows a font now; None for one that it cannot draw with."""
    from matplotlib.font_manager import fontManager, get_font

    try:
        fontManager.addfont(path)
    except (OSError, RuntimeError, ValueError, NotImplementedError):  # bitmaps cannot be scaled
        return None
    return get_font(path).family_name
