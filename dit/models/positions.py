"""Where the tokens of a sample stand: rows of positions, of which every axis is rotated.

Loader, generation and parity tests ask the same rule, so that a network sees the same positions.
"""

# F H W frames, rows and columns in patches

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class PositionRule(Protocol):
    """A value that can be a key of a cache: packs have few different grids."""

    def __call__(self, grid: tuple[int, int, int], *, fps: float) -> Tensor:
        """[F*H*W, axes] float32 of one sample, in token order; `fps` is NaN where nobody knows."""
        ...


@dataclass(frozen=True, slots=True)
class GridPositions:
    """(frame, row, column): indices, of which that of the frame may go by time."""

    base_fps: float | None = None
    """Frames are counted as those of a clip at so many frames a second; None counts them as they
    are (Wan, Hunyuan)."""

    def __call__(self, grid: tuple[int, int, int], *, fps: float) -> Tensor:
        frames, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
        if self.base_fps is not None and not math.isnan(fps):
            frames = frames * (self.base_fps / fps)
        return torch.cartesian_prod(frames, rows, columns)
