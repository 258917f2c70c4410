"""All pictures at a glance: a row for each prompt, which stands beside it."""

# H W 3 rows, columns, colours of a picture

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dit.drawing import Undrawn
from dit.sampling.grid_labels import Fonts, fonts_for, label

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

_DPI = 120
_LABEL = 2.4  # width of the prompts, in inches
_CELL = (0.8, 2.4)
"""Least and greatest height of a picture, in inches."""
_MOST_ROWS, _MOST_COLUMNS = 64, 16
_MOST_HEIGHT, _MOST_WIDTH = 100, 50
"""Of the whole, in inches: an image of more than 65,536 pixels a side cannot be drawn."""
_MOST_ASPECT = 8.0
_GAP = 6  # pixels
_INK = "#7a8087"
"""Read as well on white as on black: the grid has no background of its own."""


def draw_grid(firsts: Sequence[np.ndarray], prompts: Sequence[str], path: Path) -> list[Undrawn]:
    """Writes the grid; what it does not show, or not as it is, comes back."""
    rows: dict[str, list[np.ndarray]] = {}
    for picture_HW3, prompt in zip(firsts, prompts, strict=True):
        rows.setdefault(prompt, []).append(picture_HW3)
    shown = {prompt: rows[prompt][:_MOST_COLUMNS] for prompt in list(rows)[:_MOST_ROWS]}
    fonts = fonts_for(shown)
    path.write_bytes(_drawn(shown, fonts))
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


def _drawn(rows: dict[str, list[np.ndarray]], fonts: Fonts) -> bytes:
    """A PNG without background."""
    from matplotlib.figure import Figure

    canvas_HW4, middles = _canvas(list(rows.values()))
    height, width = (side / _DPI for side in canvas_HW4.shape[:2])
    figure = Figure(figsize=(_LABEL + width, height), dpi=_DPI)
    axes = figure.add_axes((_LABEL / (_LABEL + width), 0, width / (_LABEL + width), 1))
    axes.set_axis_off()
    axes.imshow(canvas_HW4, interpolation="nearest", aspect="auto")
    for prompt, middle in zip(rows, middles, strict=True):
        # A prompt is text: neither mathematics ($x$) nor TeX, whatever matplotlibrc says.
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
    content = io.BytesIO()
    figure.savefig(content, format="png", bbox_inches="tight", transparent=True)
    return content.getvalue()


def _canvas(rows: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, list[float]]:
    """All pictures in their places on nothing, RGBA; and the middle of each row, in pixels."""
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
    """Height and width of the place of each picture, in pixels."""
    shapes = [picture_HW3.shape for row in rows for picture_HW3 in row]
    aspect = min(max(1.0, *(width / height for height, width, _ in shapes)), _MOST_ASPECT)
    cell = min(max(_CELL[0], *(height / _DPI for height, _, _ in shapes)), _CELL[1])
    widest = _MOST_WIDTH / (max(map(len, rows)) * aspect)
    cell = min(cell, _MOST_HEIGHT / len(rows), widest)
    return round(cell * _DPI), round(cell * aspect * _DPI)


def _fitted(image: Image.Image, *, width: int, height: int) -> Image.Image:
    """As large as fits; pixels of small pictures stay squares."""
    from PIL import Image

    scale = min(width / image.width, height / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    how = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    return image.resize(size, how)
