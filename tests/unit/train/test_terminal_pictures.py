"""The samples of a validation in the terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest

from dit.console import Console
from dit.train.metrics.terminal_pictures import half_blocks
from dit.train.metrics.writers import Terminal

CELL = re.compile(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m(\u2580+)")


def drawn(*pictures: np.ndarray, columns: int = 80) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=columns)
    console.print(half_blocks(pictures, columns=columns))
    return file.getvalue()


def pixels(text: str) -> np.ndarray:
    """What a terminal shows of a picture, [16, W, 3]: the colours of its escape sequences."""
    rows = []
    for line in text.splitlines():
        cells = [[int(n) for n in m[:6]] for m in CELL.findall(line) for _ in m[6]]
        rows += [[cell[:3] for cell in cells], [cell[3:] for cell in cells]]
    return np.array(rows, np.uint8)


def test_each_character_is_two_pixels() -> None:
    rng = np.random.default_rng(0)
    digit_HW3 = rng.integers(0, 256, (8, 8, 3), np.uint8)
    assert (pixels(drawn(digit_HW3)) == digit_HW3.repeat(2, 0).repeat(2, 1)).all()
    wide_HW3 = rng.integers(0, 256, (32, 64, 3), np.uint8)
    mean = wide_HW3.reshape(16, 2, 32, 2, 3).mean((1, 3))
    assert np.abs(pixels(drawn(wide_HW3)).astype(float) - mean).max() <= 1  # it rounds


def test_pictures_stand_side_by_side_as_many_as_fit() -> None:
    grey = [np.full((8, 8, 3), 10 * n, np.uint8) for n in range(1, 6)]
    shown = pixels(drawn(*grey, columns=52))  # 16 + 1 + 16 + 1 + 16
    assert shown.shape == (16, 48, 3)
    assert shown[0, ::16, 0].tolist() == [10, 20, 30]
    assert pixels(drawn(np.zeros((8, 800, 3), np.uint8), columns=40)).shape == (16, 40, 3)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_file_gets_no_pictures(terminal: bool) -> None:
    file = io.StringIO()
    shown = Terminal(total=3, start=0, every=1)
    colours: Any = {"color_system": "truecolor"} if terminal else {}
    shown.console = Console(file=file, force_terminal=terminal, width=80, **colours)
    shown.show([np.zeros((8, 8, 3), np.uint8)])
    shown.close()
    assert ("\u2580" in file.getvalue()) == terminal
