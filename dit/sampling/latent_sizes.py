"""Converts sizes in pixels to sizes in latent cells that decoder and model accept."""

# F H W 3 frames, rows, columns, colours

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from dit.config import ModelConfig

MOST_PIXELS = 32_768
"""Most rows, columns or frames of one sample; a larger number is taken for a typing error."""
Size = tuple[int, int, int]
"""(frames, rows, columns), in pixels or in latent cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentStride:
    """The size of a latent cell, and the numbers that divide a latent's size.

    A cell has `stride` x `stride` pixels and `temporal_stride` frames. Rows and columns of a latent
    are multiples of `side_cells`, and its number of frames is a multiple of `patch_temporal`.
    """

    stride: int
    temporal_stride: int
    side_cells: int
    patch_temporal: int

    @classmethod
    def of(cls, decoder: Any, model: ModelConfig) -> LatentStride:
        """The sizes of the latent cells of `decoder`, and the patch sizes of `model`."""
        return cls(
            stride=decoder.stride,
            temporal_stride=decoder.temporal_stride,
            side_cells=model.side_cells,
            patch_temporal=model.patch_temporal,
        )

    def latent(self, pixels: Size) -> Size:
        """Size in latent cells of the smallest latent that covers `pixels`."""
        frames, height, width = pixels
        cells = 1 + -(-(frames - 1) // self.temporal_stride)
        side, patch = self.stride * self.side_cells, self.side_cells
        return (
            -(-cells // self.patch_temporal) * self.patch_temporal,
            -(-height // side) * patch,
            -(-width // side) * patch,
        )

    def pixels(self, latent: Size) -> Size:
        """Size in pixels of the video that a decoder makes of a latent of `latent` cells."""
        frames, rows, columns = latent
        return 1 + (frames - 1) * self.temporal_stride, rows * self.stride, columns * self.stride


def rounding(asked: Size, made: Size) -> str:
    """A notice that the size `made` is generated in place of `asked`; empty if both are equal."""
    names = ("frames", "rows", "columns")
    each = zip(names, asked, made, strict=True)
    more = [f"{b} {name} instead of {a}" for name, a, b in each if a != b]
    if not more:
        return ""
    return f"generates {', '.join(more)}, as the decoder needs; the surplus is cut off"


def cut(video_FHW3: np.ndarray, size: Size) -> np.ndarray:
    """`video_FHW3` cut to its first frames, rows and columns, as many as `size` says."""
    frames, height, width = size
    return video_FHW3[:frames, :height, :width]
