"""Rules that give each token of a sample its position: one row with a number for every rotary axis.

Loader, generation and parity tests call the same rule, so that a network sees the same positions.
"""

# F H W frames, rows and columns in patches

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class PositionRule(Protocol):
    """Rules are hashable, because positions are cached by rule and grid."""

    def __call__(self, grid: tuple[int, int, int], *, fps: float) -> Tensor:
        """[F*H*W, axes] float32 of one sample, in token order; `fps` is NaN where it is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class GridPositions:
    """(frame, row, column): indices; the frame may be scaled to a common frame rate."""

    base_fps: float | None = None
    """A frame's position is frame * base_fps / fps; None uses the frame's index (Wan, Hunyuan)."""

    def __call__(self, grid: tuple[int, int, int], *, fps: float) -> Tensor:
        frames, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
        if self.base_fps is not None and not math.isnan(fps):
            frames = frames * (self.base_fps / fps)
        return torch.cartesian_prod(frames, rows, columns)
