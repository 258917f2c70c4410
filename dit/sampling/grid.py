"""All pictures in one overview: one row for each prompt, with the prompt as its label.

Labels are plain text, drawn in fonts that have their characters.
"""

# H W 3 rows, columns, colours of a picture

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING
from unicodedata import category, east_asian_width

from dit.drawing import Undrawn

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


USUAL = "DejaVu Sans"
"""This font comes with matplotlib and has most alphabets."""
_LINE, _LINES = 40, 3
_CONTROL, _FORMAT = "Cc", "Cf"  # Unicode's categories
_DPI = 120
_LABEL = 2.4  # width of the prompts, in inches
_CELL = (0.8, 2.4)
"""Least and greatest height of a picture, in inches."""
_MOST_ROWS, _MOST_COLUMNS = 64, 16
_MOST_HEIGHT, _MOST_WIDTH = 100, 50
"""Limits of the grid, in inches: matplotlib draws at most 65,536 pixels a side."""
_MOST_ASPECT = 8.0
_GAP = 6  # pixels
_INK = "#7a8087"
"""Legible on white and on black, because the grid has a transparent background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fonts:
    """Font families in order of preference, and the characters that none of them has."""

    families: tuple[str, ...]
    missing: frozenset[str]


def beside(*pictures: np.ndarray | None) -> np.ndarray:
    """Pictures [H, W, 3] from left to right, as one picture of the grid; None is left out.

    Those that are given stand on the left of the sample that begins with them.
    """
    import numpy as np
    from PIL import ImageColor

    there = [picture_HW3 for picture_HW3 in pictures if picture_HW3 is not None]
    width = max(1, there[0].shape[1] // 64)
    gap_HW3 = np.full((1, width, 3), ImageColor.getrgb(_INK), np.uint8)
    parts = [part for picture_HW3 in there for part in (gap_HW3, picture_HW3)][1:]
    height = max(len(part) for part in parts)
    return np.concatenate([_lengthened(part, height) for part in parts], axis=1)


def _lengthened(picture_HW3: np.ndarray, height: int) -> np.ndarray:
    """With its last row repeated down to `height`."""
    import numpy as np

    return np.pad(picture_HW3, ((0, height - len(picture_HW3)), (0, 0), (0, 0)), "edge")


def draw_grid(
    firsts: Sequence[np.ndarray], prompts: Sequence[str], path: Path, *, title: str = ""
) -> list[Undrawn]:
    """Writes the grid; returns notices of samples and characters that it does not show.

    `title` is a line of ours above the pictures.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for picture_HW3, prompt in zip(firsts, prompts, strict=True):
        rows.setdefault(prompt, []).append(picture_HW3)
    shown = {prompt: rows[prompt][:_MOST_COLUMNS] for prompt in list(rows)[:_MOST_ROWS]}
    fonts = fonts_for(shown)
    path.write_bytes(_drawn(shown, fonts, title))
    return [*_left_out(rows, shown), *_spelled(fonts)]


def _left_out(rows: dict[str, list], shown: dict[str, list]) -> list[Undrawn]:
    all_, some = (sum(map(len, each.values())) for each in (rows, shown))
    if all_ == some:
        return []
    limit = f"the first {_MOST_ROWS} prompts, {_MOST_COLUMNS} of each"
    return [Undrawn(what="grid.png", because=f"shows {some} of {all_} samples: {limit}")]


def _spelled(fonts: Fonts) -> list[Undrawn]:
    if not fonts.missing:
        return []
    some = " ".join(sorted(fonts.missing)[:8])
    because = (
        f"no installed font has {len(fonts.missing)} of their characters ({some}), which stand as"
        " code points (U+...); install one that has, such as Noto Sans CJK. samples.json has the"
        " prompts as they are"
    )
    return [Undrawn(what="prompts in grid.png", because=because)]


def _drawn(rows: dict[str, list[np.ndarray]], fonts: Fonts, title: str) -> bytes:
    """A PNG with a transparent background."""
    from matplotlib.figure import Figure

    canvas_HW4, middles = _canvas(list(rows.values()))
    height, width = (side / _DPI for side in canvas_HW4.shape[:2])
    figure = Figure(figsize=(_LABEL + width, height), dpi=_DPI)
    axes = figure.add_axes((_LABEL / (_LABEL + width), 0, width / (_LABEL + width), 1))
    axes.set_axis_off()
    axes.imshow(canvas_HW4, interpolation="nearest", aspect="auto")
    for prompt, middle in zip(rows, middles, strict=True):
        # A prompt is plain text: without these options matplotlib reads $x$ as mathematics.
        axes.text(
            -2.5 * _GAP,
            middle,
            label(prompt, fonts),
            ha="right",
            va="center",
            color=_INK,
            family=list(fonts.families),
            parse_math=False,
            usetex=False,
        )
    if title:
        axes.set_title(title, loc="left", color=_INK, fontsize="medium")
    content = io.BytesIO()
    figure.savefig(content, format="png", bbox_inches="tight", transparent=True)
    return content.getvalue()


def _canvas(rows: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, list[float]]:
    """All pictures on a transparent canvas [H, W, 4], and the middle of each row, in pixels."""
    import numpy as np
    from PIL import Image

    height, width = _cell(rows)
    columns = max(map(len, rows))
    size = columns * (width + _GAP) - _GAP, len(rows) * (height + _GAP) - _GAP
    canvas = Image.new("RGBA", size)
    for i, row in enumerate(rows):
        for j, picture_HW3 in enumerate(row):
            image = _fitted(Image.fromarray(picture_HW3), width=width, height=height)
            left, top = ((a - b) // 2 for a, b in zip((width, height), image.size, strict=True))
            canvas.paste(image, (j * (width + _GAP) + left, i * (height + _GAP) + top))
    middles = [i * (height + _GAP) + height / 2 for i in range(len(rows))]
    return np.asarray(canvas), middles


def _cell(rows: Sequence[Sequence[np.ndarray]]) -> tuple[int, int]:
    """Height and width of one cell of the grid, in pixels."""
    shapes = [picture_HW3.shape for row in rows for picture_HW3 in row]
    aspect = min(max(1.0, *(width / height for height, width, _ in shapes)), _MOST_ASPECT)
    cell = min(max(_CELL[0], *(height / _DPI for height, _, _ in shapes)), _CELL[1])
    widest = _MOST_WIDTH / (max(map(len, rows)) * aspect)
    cell = min(cell, _MOST_HEIGHT / len(rows), widest)
    return round(cell * _DPI), round(cell * aspect * _DPI)


def _fitted(image: Image.Image, *, width: int, height: int) -> Image.Image:
    """The image scaled to fit; an enlarged pixel stays a square."""
    from PIL import Image

    scale = min(width / image.width, height / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    how = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    return image.resize(size, how)


def short_label(caption: str) -> str:
    """The first three lines of a caption, without invisible and direction-changing characters.

    Control characters become code points, because some fonts draw boxes for them.
    """
    plain = re.sub(r"\s+", " ", caption[: 50 * _LINE]).strip()
    plain = _each_spelled(plain, {one for one in plain if category(one) == _CONTROL})
    # This drops left-to-right marks, emoji joiners and variation selectors.
    plain = "".join(one for one in plain if category(one) != _FORMAT and not _selects(one))
    most = _width(plain) * _LINES
    return plain if len(plain) <= most else plain[: most - 3].rstrip() + "..."


def label(caption: str, fonts: Fonts) -> str:
    """The lines of a label; a character without a font becomes its code point."""
    text = _each_spelled(short_label(caption), fonts.missing)
    width = _width(text)
    most = width * _LINES
    return fill(text if len(text) <= most else text[: most - 3] + "...", width=width)


def _width(text: str) -> int:
    """Characters that fit into one line: half as many if some have double width."""
    return _LINE // 2 if any(east_asian_width(one) in "WF" for one in text) else _LINE


def _each_spelled(text: str, characters: Collection[str]) -> str:
    """The text with these characters replaced by their code points, as words."""
    spelled = (f" U+{ord(one):04X} " if one in characters else one for one in text)
    return " ".join("".join(spelled).split())


def _selects(character: str) -> bool:
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"


def fonts_for(captions: Iterable[str], *, installed: Sequence[str] | None = None) -> Fonts:
    """The usual font, and as few installed fonts as possible for the characters that it lacks.

    `installed` are font files; None asks the system.
    """
    from matplotlib.font_manager import findfont, findSystemFonts, get_font

    wanted = {one for caption in captions for one in short_label(caption) if one != " "}
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
    """Font file -> which of the characters it has."""
    from matplotlib.font_manager import get_font

    found = {}
    for path in files:
        try:
            font = get_font(path)
        except (OSError, RuntimeError, ValueError):  # a damaged font file
            continue
        found[path] = {one for one in characters if font.get_char_index(ord(one))}
    return found


@cache
def _added(path: str) -> str | None:
    """Registers a font file with matplotlib; returns its family, or None if it cannot be drawn."""
    from matplotlib.font_manager import fontManager, get_font

    try:
        fontManager.addfont(path)
    except (
        OSError,
        RuntimeError,
        ValueError,
        NotImplementedError,
    ):  # a bitmap font cannot be scaled
        return None
    return get_font(path).family_name
