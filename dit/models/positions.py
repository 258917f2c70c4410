"""Rules that give each token of a sample its position: one row with a number for every rotary axis.

Loader, generation and parity tests call the same rule, so that a network sees the same positions.
"""

# F H W frames, rows and columns in patches

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import Grid


class PositionRule(Protocol):
    """Rules are hashable, because positions are cached by rule and grids."""

    @property
    def axes(self) -> int:
        """Numbers of a position."""
        ...

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        """[tokens, axes] float32 of one sample, in token order; `fps` is NaN where it is unknown.

        `grids` are those of the target and of its reference latents.
        """
        ...


@dataclass(frozen=True, slots=True)
class GridPositions:
    """(frame, row, column): indices; the frame may be scaled to a common frame rate.

    The frames of a reference latent count on after those of the target and of the references before
    it (FLUX Kontext and Qwen-Image-Edit, whose latents have one frame).
    """

    base_fps: float | None = None
    """A frame's position is frame * base_fps / fps; None uses the frame's index (Wan, Hunyuan)."""

    @property
    def axes(self) -> int:
        return 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        parts, before = [], 0
        for grid in grids:
            frames, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
            frames += before
            if self.base_fps is not None and not math.isnan(fps):
                frames = frames * (self.base_fps / fps)
            parts.append(torch.cartesian_prod(frames, rows, columns))
            before += grid[0]
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class CroppedPositions:
    """(row, column) in a square table, of which a picture takes the middle (SD3)."""

    size: int
    """Rows and columns of the table."""

    @property
    def axes(self) -> int:
        return 2

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        """Raises ValueError where a picture is larger than the table."""
        ((frames, *sides),) = grids
        if frames > 1 or max(sides) > self.size:
            raise ValueError(
                f"{frames} frames of {sides[0]} x {sides[1]} tokens: the table of positions,"
                f" model.max_size, has 1 of {self.size} x {self.size}; ask for a smaller picture"
            )
        first = ((self.size - side) // 2 for side in sides)
        rows, columns = (
            torch.arange(at, at + side, dtype=torch.float32)
            for at, side in zip(first, sides, strict=True)
        )
        return torch.cartesian_prod(rows, columns)


@dataclass(frozen=True, slots=True)
class CentredPositions:
    """(number of the picture, row, column): rows and columns are counted from the middle.

    Of h rows the first is -ceil(h / 2). Each reference is a picture more. Source: `QwenEmbedRope`
    with `scale_rope` in Diffusers.
    """

    @property
    def axes(self) -> int:
        return 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        parts = []
        for number, (frames, height, width) in enumerate(grids):
            sides = (torch.arange(side // 2 - side, side // 2) for side in (height, width))
            parts.append(torch.cartesian_prod(torch.arange(number, number + frames), *sides))
        return torch.cat(parts).float()


# Most datasets have few sizes, and for small ones this takes longer than a copy.
@lru_cache(maxsize=32)
def padded_positions(
    grids: tuple[Grid, ...], padded: int, fps: float, positions: PositionRule
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of a sample, with padding, and which of them are real."""
    position_TA = positions(grids, fps=fps)
    padding = padded - len(position_TA)
    return pad(position_TA, (0, 0, 0, padding)), torch.arange(padded) < len(position_TA)
