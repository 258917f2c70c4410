"""Pictures as text of a terminal: a character is two pixels, one above the other."""

# H W 3 rows, columns, colours of a picture

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

_HEIGHT = 16  # pixels: 8 lines
_UPPER_HALF = "\u2580"  # its ink is the upper pixel, its background the lower one


def half_blocks(pictures: Sequence[np.ndarray], *, columns: int) -> Text:
    """Pictures uint8 [H, W, 3] side by side, as many as fit into so many columns."""
    lines = [Text() for _ in range(_HEIGHT // 2)]
    for picture_HW3 in pictures:
        small_HW3 = _small(picture_HW3, columns)
        if len(lines[0]) + bool(lines[0]) + small_HW3.shape[1] > columns:
            break
        for line, upper_W3, lower_W3 in zip(lines, small_HW3[::2], small_HW3[1::2], strict=True):
            line.append(" " if line else "")
            for upper, lower in zip(upper_W3.tolist(), lower_W3.tolist(), strict=True):
                line.append(_UPPER_HALF, Style(color=_rgb(upper), bgcolor=_rgb(lower)))
    return Text("\n").join(lines)


def _small(picture_HW3: np.ndarray, columns: int) -> np.ndarray:
    """The picture at the height of the preview; an enlarged pixel stays a square."""
    height, width, _ = picture_HW3.shape
    how = Image.Resampling.NEAREST if height <= _HEIGHT else Image.Resampling.BOX
    wide = min(max(1, round(width * _HEIGHT / height)), columns)
    return np.asarray(Image.fromarray(picture_HW3).resize((wide, _HEIGHT), how))


def _rgb(colour: Sequence[int]) -> Color:
    return Color.from_rgb(*colour)
