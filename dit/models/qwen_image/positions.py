"""Positions of Qwen-Image's tokens: `QwenEmbedRope` with `scale_rope` in Diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dit.batch import Grid


@dataclass(frozen=True, slots=True)
class CentredPositions:
    """(number of the picture, row, column): rows and columns are counted from the middle.

    Of h rows the first is -ceil(h / 2). Each reference is a picture more.
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


def text_positions(lengths: Sequence[int], grids: Sequence[Sequence[Grid]]) -> Tensor:
    """Positions [L, 3] float32 of the texts of samples, whose pictures are `grids`.

    A token has the same position on all axes, counted on from half of the longest side.
    """
    rows = [
        torch.arange(length) + max(side // 2 for grid in pictures for side in grid[1:])
        for length, pictures in zip(lengths, grids, strict=True)
    ]
    return torch.cat(rows).float()[:, None].expand(-1, 3)
