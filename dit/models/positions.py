"""Tokens of a sample (patches of its latent), and rules that assign positions to them.

A latent is converted to the tokens of one sample, and back; `dit.data.pack` writes the tokens of
many samples into a pack. A position is one row with a number for each rotary axis. Loader,
generation and tests against Diffusers call the same rule, so that a network always gets the same
positions.
"""

# c latent channels, C numbers in a token, T tokens, A axes
# F H W frames, rows, columns of a latent

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import Grid, PackedBatch


def patchify(latent_CFHW: Tensor, patch_temporal: int, patch_spatial: int) -> tuple[Grid, Tensor]:
    """(grid of a latent [c, F, H, W] in patches, tokens [T, C]).

    Tokens are in the order (frame, row, column), features of a token in the order (c, t, h, w).
    """
    pt, p = patch_temporal, patch_spatial
    cut = latent_CFHW.unflatten(3, (-1, p)).unflatten(2, (-1, p)).unflatten(1, (-1, pt))
    tokens = cut.permute(1, 3, 5, 0, 2, 4, 6)  # frame row column c t h w
    f, h, w = tokens.shape[:3]
    return (f, h, w), tokens.flatten(3).flatten(0, 2)


def write_patches(out_TC: Tensor, latent_CFHW: Tensor, grid: Grid, patch: Grid) -> None:
    """Writes the patches of `latent_CFHW` into the tokens `out_TC`, in the order of `patchify`.

    `grid` is the size of the latent in patches, `patch` the size of a patch in latent cells.
    """
    (f, h, w), (pt, ph, pw) = grid, patch
    latent_CFHW = latent_CFHW.to(out_TC.dtype)
    if pw == 2:  # the two neighbours in a row move as one number, 8 times as fast
        pair = torch.int32 if out_TC.dtype == torch.bfloat16 else torch.int64
        latent_CFHW, out_TC, pw = latent_CFHW.view(pair), out_TC.view(pair), 1
    split = latent_CFHW.view(-1, f, pt, h, ph, w, pw)
    out_TC.view(f, h, w, -1, pt, ph, pw).copy_(split.permute(1, 3, 5, 0, 2, 4, 6))


def unpatchify(latent_TC: Tensor, grid: Grid, patch_temporal: int, patch_spatial: int) -> Tensor:
    """The latent [c, F, H, W] from its tokens, the first rows of `latent_TC`; undoes `patchify`."""
    f, h, w = grid
    pt, p = patch_temporal, patch_spatial
    patches = latent_TC[: f * h * w].reshape(f, h, w, -1, pt, p, p)  # frame row column c t h w
    return patches.permute(3, 0, 4, 1, 5, 2, 6).reshape(-1, f * pt, h * p, w * p)


def unpack_latents(
    latent_TC: Tensor, batch: PackedBatch, *, patch_temporal: int, patch_spatial: int
) -> list[Tensor]:
    """The latent [c, F, H, W] of each sample of the pack, without padding.

    `latent_TC` has the features of a token in the order (c, t, h, w).
    """
    return [
        unpatchify(latent_TC[start:], grid, patch_temporal, patch_spatial)
        for grid, start in zip(batch.grids, batch.starts[:-1], strict=True)
    ]


class PositionRule(Protocol):
    """Interface of position rules, which are hashable, because positions are cached by rule."""

    @property
    def axes(self) -> int:
        """Number of axes of a position."""
        ...

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        """Positions [tokens, axes] float32 of one sample, in token order.

        `grids` are those of the target and of its reference latents; `fps` is NaN if unknown.
        """
        ...


@dataclass(frozen=True, slots=True)
class GridPositions:
    """Positions (frame, row, column) by index; frames may be scaled to a common frame rate.

    The frames of a reference latent are numbered after those of the target and of earlier
    references (FLUX Kontext and Qwen-Image-Edit, whose latents have one frame).
    """

    base_fps: float | None = None
    """If set, a frame's position is frame * base_fps / fps; None: the frame's index (Wan,
    Hunyuan)."""

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
class TimeOffsetPositions:
    """Positions (time, row, column, index in the text); the index is 0 for pictures.

    Frame f of the target has time f, and frame f of reference j, counted from 1, time f + j *
    `step` (`Flux2Pipeline` of Diffusers).
    """

    step: int = 10

    @property
    def axes(self) -> int:
        return 4

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        parts = []
        for number, (frames, rows, columns) in enumerate(grids):
            time = torch.arange(frames) + self.step * number
            parts.append(torch.cartesian_prod(time, torch.arange(rows), torch.arange(columns)))
        return pad(torch.cat(parts).float(), (0, 1))

    @staticmethod
    def of_text(lengths: Sequence[int]) -> Tensor:
        """Positions [L, 4] float32 of texts with these `lengths`: (0, 0, 0, index in the text)."""
        places = [torch.arange(length) for length in lengths]
        return pad(torch.cat(places).float()[:, None], (3, 0))


@dataclass(frozen=True, slots=True)
class HalfStepPositions:
    """Positions (frame, row / 2, column / 2, index).

    The index is 0 for the target and -j for reference j, counted from 1. Text tokens have their
    index in the text, and 0 on the other axes (`TimeOffsetPositions.of_text`). Source:
    `_prepare_image_ids` of Diffusers' modular pipelines.
    """

    @property
    def axes(self) -> int:
        return 4

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        parts = []
        for number, (frames, *sides) in enumerate(grids):
            time, place = torch.arange(float(frames)), torch.tensor([-float(number)])
            halves = (torch.arange(side) / 2 for side in sides)
            parts.append(torch.cartesian_prod(time, *halves, place))
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class FarPicturePositions:
    """Positions (frame, row, column), each counted from `first`, beyond the index of any text.

    Source: `Ideogram4Pipeline` of Diffusers.
    """

    first: int = 65536

    @property
    def axes(self) -> int:
        return 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        return GridPositions()(grids, fps=fps) + self.first

    @staticmethod
    def of_text(lengths: Sequence[int]) -> Tensor:
        """Positions [L, 3] float32 of texts with these `lengths`: the index, on all three axes."""
        places = [torch.arange(length) for length in lengths]
        return torch.cat(places).float()[:, None].repeat(1, 3)


@dataclass(frozen=True, slots=True)
class ReferencesFirstPositions:
    """Positions (index, row, column, picture): references in sequence, the target last.

    All tokens of a picture have one index, and the next picture's index is larger by this picture's
    longest side in tokens. The number of the picture is 0 for the target, and counts references
    from 1; nothing is rotated by it. Source: the public code of OmniGen2.
    """

    @property
    def axes(self) -> int:
        return 4

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        target, *references = grids
        places = [*accumulate((max(grid) for grid in references), initial=0)]
        parts = []
        for number, grid in enumerate((target, *references)):
            place = torch.tensor([places[number - 1]])
            _, rows, columns = (torch.arange(size) for size in grid)
            parts.append(torch.cartesian_prod(place, rows, columns, torch.tensor([number])))
        return torch.cat(parts).float()


@dataclass(frozen=True, slots=True)
class CroppedPositions:
    """Positions (row, column) in a square table, of which a picture uses the middle (SD3)."""

    size: int
    """Number of rows, and of columns, of the table."""

    @property
    def axes(self) -> int:
        return 2

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        """Positions [tokens, 2] in the table.

        Raises:
            ValueError: the picture is larger than the table, or has several frames.
        """
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
    """Positions (number of the picture, row, column), rows and columns counted from the centre.

    The first of h rows has position -ceil(h / 2). The target is picture 0, and references follow.
    Source: `QwenEmbedRope` with `scale_rope` in Diffusers.
    """

    counts_frames: bool = True
    """Whether each frame of a clip counts as a separate picture."""

    @property
    def axes(self) -> int:
        return 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        parts = []
        for number, (frames, height, width) in enumerate(grids):
            sides = (torch.arange(side // 2 - side, side // 2) for side in (height, width))
            numbers = torch.arange(frames) * self.counts_frames + number
            parts.append(torch.cartesian_prod(numbers, *sides))
        return torch.cat(parts).float()


@dataclass(frozen=True, slots=True)
class PixelPositions:
    """Positions (time, row, column) of a token's first pixels, as fractions of the largest clip.

    The largest clip has 20 s of 2048 x 2048 pixels. Every latent counts from 0, so positions of
    references coincide with those of the target. Operations are those of Diffusers' LTX pipelines
    in their order, in float32, because the network multiplies positions by up to 15,700.
    """

    causal: bool
    """Whether the first latent frame is one pixel frame (`LTXConditionPipeline`). If not, all
    latent frames last equally long (`LTXPipeline`, `LTXImageToVideoPipeline`)."""
    patch: tuple[int, int] = (1, 1)
    """(frames, rows or columns) of latent cells in one token."""

    @property
    def axes(self) -> int:
        return 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        return self.corners(grids, fps=fps) / torch.tensor(_LARGEST)

    def of_condition(self, grid: Grid, *, frame: int, fps: float) -> Tensor:
        """Positions [tokens, 3] of a conditioning picture or clip from pixel frame `frame` on.

        They are fractions of the largest clip. `frame` has an effect only with `causal`.
        """
        return self.corners((grid,), fps=fps, frame=frame) / torch.tensor(_LARGEST)

    def corners(self, grids: tuple[Grid, ...], *, fps: float, frame: int = 0) -> Tensor:
        """Positions [tokens, 3] in seconds, pixel rows and pixel columns.

        They are Diffusers' `video_coords`, transposed. `frame` is the pixel frame at which the
        first latent frame begins; it has an effect only with `causal`.
        """
        rate, (step, side) = _USUAL_RATE if math.isnan(fps) else fps, self.patch
        parts = []
        for grid in grids:
            index, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
            if self.causal:
                first = (index * step * CELL[0] + 1 - CELL[0]).clamp(min=0) + frame
                seconds = first * (1 / rate)
            else:
                seconds = index * (CELL[0] / rate) * step
            pixels = CELL[1] * side
            parts.append(torch.cartesian_prod(seconds, rows * pixels, columns * pixels))
        return torch.cat(parts)


CELL = (8, 32)
"""(pixel frames, pixel rows or columns) of a latent cell of LTX-Video."""
_LARGEST = (20.0, 2048.0, 2048.0)
"""The largest clip: seconds, pixel rows, pixel columns."""
_USUAL_RATE = 25.0
"""Frame rate of clips whose rate is unknown, as in LTX-Video's pipelines."""
_USUAL_RATE_OF_2 = 24.0
"""Frame rate of clips whose rate is unknown, as in LTX-2's pipelines."""


@dataclass(frozen=True, slots=True)
class CellMiddles:
    """Positions (time, row, column) of the middle of a token's pixels, as fractions.

    They are fractions of a clip of 20 s and 2048 x 2048 pixels. The first latent frame is one pixel
    frame. Every latent counts from 0, so positions of references coincide with those of the target.
    Operations are those of Diffusers' `LTX2AudioVideoRotaryPosEmbed` in their order, in float32.
    """

    patch_spatial: int = 1

    @property
    def axes(self) -> int:
        return 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        rate, side = _USUAL_RATE_OF_2 if math.isnan(fps) else fps, CELL[1] * self.patch_spatial
        parts = []
        for grid in grids:
            index, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
            first, last = (
                ((index + end) * CELL[0] + 1 - CELL[0]).clamp(min=0) / rate for end in (0, 1)
            )
            middles = ((one * side + (one + 1) * side) / 2 for one in (rows, columns))
            parts.append(torch.cartesian_prod((first + last) / 2, *middles))
        return torch.cat(parts) / torch.tensor(_LARGEST)

    @staticmethod
    def of_sound(index_T1: Tensor, rate: float) -> Tensor:
        """Positions [T, 1] of the middles of a sound's latent frames `index_T1`, counted from 0.

        They are fractions of 20 s. At the published `rate` of 25 latent frames a second, the first
        latent frame is one spectrum and each other one is 4 spectra; other rates stretch time.
        """
        hop, samples = 160, 16_000
        first, last = (
            ((index_T1 + end) * 4 + 1 - 4).clamp(min=0) * hop / samples for end in (0, 1)
        )
        return (first + last) / 2 / _LARGEST[0] * (samples / hop / 4 / rate)


# Most datasets have few sizes, and for small ones this takes longer than a copy.
@lru_cache(maxsize=32)
def padded_positions(
    grids: tuple[Grid, ...], padded: int, fps: float, positions: PositionRule
) -> tuple[Tensor, Tensor]:
    """Positions [`padded`, axes] of a sample's tokens, with rows of zeros for padding, and a mask.

    The mask, bool [`padded`], is True for real tokens. Both tensors are cached, so callers must not
    change them.
    """
    position_TA = positions(grids, fps=fps)
    padding = padded - len(position_TA)
    return pad(position_TA, (0, 0, 0, padding)), torch.arange(padded) < len(position_TA)
