"""Draws all pictures in one overview, grouped by prompt, with the prompt beneath them.

There are as many columns as fit on a page. Labels are plain text, in fonts that have their
characters. The file lists the place of each picture (`CELLS`), so that a report can rearrange them
for a narrow window.
"""

# H W 3 rows, columns, colours of a picture; all places are in pixels

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any
from unicodedata import category, east_asian_width

import numpy as np
from PIL import Image, ImageColor

from dit.watching import CELLS, NotShown

USUAL = "DejaVu Sans"
"""matplotlib's own font, which covers most alphabets."""
_LINE, _LINES = 40, 3
_CONTROL, _FORMAT = "Cc", "Cf"  # Unicode's categories
_DPI = 120
_PAGE = 1248  # width of the report on a large screen
_CELL = (96, 288)
"""Smallest and largest height of a picture, in pixels."""
_LABEL = 156
"""Smallest width of a prompt's label in pixels, for 20 letters."""
_POINTS = 8
_LETTER, _LINE_HEIGHT = 7.8, 18  # pixels, at `_POINTS`; few texts have wider letters
_MOST_PROMPTS, _MOST_OF_ONE = 64, 16
_MOST_HEIGHT = 12_000
"""Approximate largest height of the grid in pixels; matplotlib draws at most 65,536."""
_MOST_ASPECT = 8.0
_GAP = 6
_LONGEST = 500  # letters of a prompt in the file
_INK = "#7a8087"
"""Colour of text; it is legible on white and on black, because the background is transparent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fonts:
    """Font families in order of preference, and the characters that no family has."""

    families: tuple[str, ...]
    missing: frozenset[str]


def beside(*pictures: np.ndarray | None) -> np.ndarray:
    """The `pictures` [H, W, 3] side by side, such as a condition and its sample; None is skipped.

    There is a gap between pictures. Lower pictures are extended downwards by their last row.
    """
    there = [picture_HW3 for picture_HW3 in pictures if picture_HW3 is not None]
    width = max(1, there[0].shape[1] // 64)
    gap_HW3 = np.full((1, width, 3), ImageColor.getrgb(_INK), np.uint8)
    parts = [part for picture_HW3 in there for part in (gap_HW3, picture_HW3)][1:]
    height = max(len(part) for part in parts)
    # The last row of a lower one is repeated.
    as_high = [np.pad(part, ((0, height - len(part)), (0, 0), (0, 0)), "edge") for part in parts]
    return np.concatenate(as_high, axis=1)


def draw_grid(
    firsts: Sequence[np.ndarray], prompts: Sequence[str], path: Path, *, title: str = ""
) -> list[NotShown]:
    """Writes the grid of the first frames `firsts` to `path`, as a PNG file.

    `prompts` has the prompt of each, and `title` is a line above the pictures. Returns notices of
    samples that are left out and of characters that no font has.
    """
    of_prompt: dict[str, list[np.ndarray]] = {}
    for picture_HW3, prompt in zip(firsts, prompts, strict=True):
        of_prompt.setdefault(prompt, []).append(picture_HW3)
    shown = {prompt: of_prompt[prompt][:_MOST_OF_ONE] for prompt in list(of_prompt)[:_MOST_PROMPTS]}
    fonts = fonts_for(shown)
    blocks = _arranged(shown, fonts, top=_LINE_HEIGHT + _GAP if title else 0)
    path.write_bytes(_drawn(blocks, fonts, title))
    return [*_left_out(of_prompt, shown), *_spelled(fonts)]


def _left_out(every: Mapping[str, list], shown: Mapping[str, list]) -> list[NotShown]:
    all_, some = (sum(map(len, each.values())) for each in (every, shown))
    if all_ == some:
        return []
    limit = f"the first {_MOST_PROMPTS} prompts, {_MOST_OF_ONE} of each"
    return [NotShown(what="grid.png", because=f"shows {some} of {all_} samples: {limit}")]


def _spelled(fonts: Fonts) -> list[NotShown]:
    if not fonts.missing:
        return []
    some = " ".join(sorted(fonts.missing)[:8])
    because = (
        f"no installed font has {len(fonts.missing)} of their characters ({some}), which are shown"
        " as code points (U+...); install a font that has them, such as Noto Sans CJK."
        " samples.json has the prompts as they are"
    )
    return [NotShown(what="prompts in grid.png", because=because)]


Box = tuple[int, int, int, int]
"""(left, top, right, bottom) of a rectangle in pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The pictures of one prompt and its label, with their boxes on the page."""

    prompt: str
    pictures: list[tuple[Box, Image.Image]]
    label: str
    label_box: Box


def _arranged(shown: Mapping[str, list[np.ndarray]], fonts: Fonts, *, top: int) -> list[Block]:
    """Arranges the pictures of each prompt in blocks, in rows from `top` downwards."""
    height, width = _cell(list(shown.values()))
    # A label has room beneath the narrowest block.
    width = max(width, math.ceil(_LABEL / min(map(len, shown.values()))))
    fit = max(1, (_PAGE + _GAP) // (width + _GAP))
    # If a prompt has more pictures than fit side by side, they are in rows of equal length.
    columns = {p: math.ceil(len(of) / math.ceil(len(of) / fit)) for p, of in shown.items()}
    total = sum(columns.values())
    fit = max(*columns.values(), math.ceil(total / math.ceil(total / fit)))
    blocks, column, below = list[Block](), 0, top
    for prompt, pictures in shown.items():
        if column + columns[prompt] > fit:
            column, top = 0, below
        cells = _cells(len(pictures), columns[prompt], (width, height))
        left = column * (width + _GAP)
        placed = [
            _placed(picture_HW3, (left + x, top + y), (width, height))
            for picture_HW3, (x, y) in zip(pictures, cells, strict=True)
        ]
        right = left + columns[prompt] * (width + _GAP) - _GAP
        under = top + cells[-1][1] + height + _GAP // 2
        words = label(prompt, fonts, width=int((right - left) / _LETTER))
        end = under + _LINE_HEIGHT * (words.count("\n") + 1)
        box = (left, under, right, end)
        blocks.append(Block(prompt=prompt, pictures=placed, label=words, label_box=box))
        column, below = column + columns[prompt], max(below, end + 2 * _GAP)
    return blocks


def _cells(count: int, columns: int, cell: tuple[int, int]) -> list[tuple[int, int]]:
    width, height = cell
    return [(i % columns * (width + _GAP), i // columns * (height + _GAP)) for i in range(count)]


def _placed(
    picture_HW3: np.ndarray, corner: tuple[int, int], cell: tuple[int, int]
) -> tuple[Box, Image.Image]:
    """Scales a picture to fit into its cell; it is at the left, and centred vertically.

    `corner` is (left, top), `cell` (width, height). Returns its box and the image.
    """
    image = _fitted(Image.fromarray(picture_HW3), width=cell[0], height=cell[1])
    left, top = corner[0], corner[1] + (cell[1] - image.height) // 2
    return (left, top, left + image.width, top + image.height), image


def _drawn(blocks: Sequence[Block], fonts: Fonts, title: str) -> bytes:
    """A PNG file with a transparent background, which also lists its pictures (`CELLS`)."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox, IdentityTransform

    canvas = _canvas(blocks, least=int(len(title) * _LETTER))
    width, height = canvas.size
    # matplotlib rounds down, and 803 / 120 * 120 is less than 803.
    size = (width + 0.01) / _DPI, (height + 0.01) / _DPI
    figure = Figure(figsize=size, dpi=_DPI)
    figure.figimage(np.asarray(canvas), origin="upper")

    def write(text: str, box: Box, **options: Any) -> None:
        left, top, right, bottom = box
        # A prompt is plain text: without these options matplotlib reads $x$ as mathematics.
        figure.text(
            left,
            height - top,
            text,
            transform=IdentityTransform(),
            va="top",
            color=_INK,
            parse_math=False,
            usetex=False,
            clip_on=True,
            clip_box=Bbox([[left, height - bottom], [right, height - top]]),
            **options,
        )

    if title:
        write(title, (0, 0, width, _LINE_HEIGHT), fontsize=_POINTS)
    for block in blocks:
        write(block.label, block.label_box, family=list(fonts.families), fontsize=_POINTS)
    content = io.BytesIO()
    named = json.dumps({"title": title, "cells": _named(blocks)})
    figure.savefig(content, format="png", transparent=True, metadata={CELLS: named})
    return content.getvalue()


def _named(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    return [
        {"prompt": block.prompt[:_LONGEST], "box": box}
        for block in blocks
        for box, _ in block.pictures
    ]


def _canvas(blocks: Sequence[Block], *, least: int) -> Image.Image:
    """A transparent canvas with all pictures and room for labels.

    It is at least `least` pixels wide.
    """
    rights, ends = zip(*(block.label_box[2:] for block in blocks), strict=True)
    canvas = Image.new("RGBA", (max(least, *rights), max(ends)))
    for block in blocks:
        for box, image in block.pictures:
            canvas.paste(image, box)
    return canvas


def _cell(shown: Sequence[Sequence[np.ndarray]]) -> tuple[int, int]:
    """(height, width) of a cell in pixels, for pictures `shown`, a list for each prompt.

    The height is that of the highest picture, but within `_CELL`, and less if the cells would
    otherwise exceed the page. The width follows from the widest aspect of a picture, at most
    `_MOST_ASPECT`.
    """
    shapes = [picture_HW3.shape for of in shown for picture_HW3 in of]
    aspect = min(max(1.0, *(width / height for height, width, _ in shapes)), _MOST_ASPECT)
    cell = min(max(_CELL[0], *(height for height, _, _ in shapes)), _CELL[1], _PAGE / aspect)
    cell = min(cell, math.sqrt(_MOST_HEIGHT * _PAGE / aspect / len(shapes)))
    return round(cell), round(cell * aspect)


def _fitted(image: Image.Image, *, width: int, height: int) -> Image.Image:
    """`image` scaled to fit into `width` x `height`; enlarged pixels stay sharp squares."""
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


def label(caption: str, fonts: Fonts, *, width: int = _LINE) -> str:
    """The caption in lines of `width` letters; letters that no font has become code points."""
    text = _each_spelled(short_label(caption), fonts.missing)
    width = min(width, _LINE) * _width(text) // _LINE
    most = width * _LINES
    return fill(text if len(text) <= most else text[: most - 3] + "...", width=width)


def _width(text: str) -> int:
    """Characters in a line of a label: half as many if some of `text` have double width."""
    return _LINE // 2 if any(east_asian_width(one) in "WF" for one in text) else _LINE


def _each_spelled(text: str, characters: Collection[str]) -> str:
    spelled = (f" U+{ord(one):04X} " if one in characters else one for one in text)
    return " ".join("".join(spelled).split())


def _selects(character: str) -> bool:
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"


def fonts_for(captions: Iterable[str], *, installed: Sequence[str] | None = None) -> Fonts:
    """The fonts for `captions`: the default one, and others that have the characters it lacks.

    The font that has the most of these characters is taken first. `installed` are font files; None
    asks the system.
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
    """Which of `characters` each of the font files has; damaged files are left out."""
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
