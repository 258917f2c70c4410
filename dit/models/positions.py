"""Tokens of a sample (patches of its latent), and rules that give tokens their positions.

`patchify` and its relatives convert a latent to tokens and back; `dit.data.pack` writes the tokens
of many samples into a pack. A position is a vector with a number for each rotary axis. Loader,
generation and tests against Diffusers use the same rule, so that a network always gets the same
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
    """(grid, tokens [T, C]) of a latent; the grid is the latent's size in patches.

    Tokens are in the order (frame, row, column), features of a token in the order (c, t, h, w).
    """
    pt, p = patch_temporal, patch_spatial
    cut = latent_CFHW.unflatten(3, (-1, p)).unflatten(2, (-1, p)).unflatten(1, (-1, pt))
    tokens = cut.permute(1, 3, 5, 0, 2, 4, 6)  # frame row column c t h w
    f, h, w = tokens.shape[:3]
    return (f, h, w), tokens.flatten(3).flatten(0, 2)


def write_patches(out_TC: Tensor, latent_CFHW: Tensor, grid: Grid, patch: Grid) -> None:
    """Writes the patches of `latent_CFHW` into the tokens `out_TC`, in the order of `patchify`.

    `grid` is the size of the latent in patches, `patch` the size of a patch in latent pixels.
    """
    (f, h, w), (pt, ph, pw) = grid, patch
    latent_CFHW = latent_CFHW.to(out_TC.dtype)
    if pw == 2:  # two adjacent numbers of a row are copied as one, which is 8 times as fast
        pair = torch.int32 if out_TC.dtype == torch.bfloat16 else torch.int64
        latent_CFHW, out_TC, pw = latent_CFHW.view(pair), out_TC.view(pair), 1
    split = latent_CFHW.view(-1, f, pt, h, ph, w, pw)
    out_TC.view(f, h, w, -1, pt, ph, pw).copy_(split.permute(1, 3, 5, 0, 2, 4, 6))


def unpatchify(latent_TC: Tensor, grid: Grid, patch_temporal: int, patch_spatial: int) -> Tensor:
    """The latent [c, F, H, W] of the first tokens of `latent_TC`: the inverse of `patchify`."""
    f, h, w = grid
    pt, p = patch_temporal, patch_spatial
    patches = latent_TC[: f * h * w].reshape(f, h, w, -1, pt, p, p)  # frame row column c t h w
    return patches.permute(3, 0, 4, 1, 5, 2, 6).reshape(-1, f * pt, h * p, w * p)


def unpack_latents(
    latent_TC: Tensor, batch: PackedBatch, *, patch_temporal: int, patch_spatial: int
) -> list[Tensor]:
    """The latent [c, F, H, W] of each sample of the pack, without padding.

    `latent_TC` are the tokens of the pack, with features in the order (c, t, h, w).
    """
    return [
        unpatchify(latent_TC[start:], grid, patch_temporal, patch_spatial)
        for grid, start in zip(batch.grids, batch.starts[:-1], strict=True)
    ]


class PositionRule(Protocol):
    """Interface of position rules. They must be hashable, because positions are cached by rule."""

    @property
    def axes(self) -> int:
        """Number of axes of a position."""
        ...

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        """The positions [tokens, axes], float32, of the tokens of one sample, in order.

        `grids` are the grids of the target and of its reference latents. `fps` is the frame rate,
        or NaN if unknown.
        """
        ...


@dataclass(frozen=True, slots=True)
class GridPositions:
    """Positions (frame, row, column): indices of patches; frames may be scaled by the frame rate.

    Frames of a reference latent are numbered after those of the target and of earlier references
    (FLUX Kontext, whose latents have one frame).
    """

    base_fps: float | None = None
    """If set, the position of a frame is index * base_fps / fps; None: its index (Wan, Hunyuan)."""

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

    Frame f of the target has time f. Frame f of reference j = 1, 2, ... has time f + j * `step`.
    Source: `Flux2Pipeline` of Diffusers.
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
        """The positions [L, 4], float32, of texts with these `lengths`: (0, 0, 0, index)."""
        places = [torch.arange(length) for length in lengths]
        return pad(torch.cat(places).float()[:, None], (3, 0))


@dataclass(frozen=True, slots=True)
class HalfStepPositions:
    """Positions (frame, row / 2, column / 2, index).

    The index is 0 for the target and -j for reference j = 1, 2, .... Text tokens have their index
    in the text, and 0 on the other axes (`TimeOffsetPositions.of_text`). Source:
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
    """Positions (frame, row, column), each counted from `first`, a number beyond all text indices.

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
        """The positions [L, 3], float32, of texts with these `lengths`: the index on all axes."""
        places = [torch.arange(length) for length in lengths]
        return torch.cat(places).float()[:, None].repeat(1, 3)


@dataclass(frozen=True, slots=True)
class ReferencesFirstPositions:
    """Positions (index, row, column, picture): references first, then the target.

    All tokens of a picture have the same index. The index of the next picture is larger by the
    longest side of this picture, in tokens. The picture number is 0 for the target and 1, 2, ...
    for references; it is not a rotary axis. Source: the public code of OmniGen2.
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
    """Positions (row, column) in a square table, in whose middle the picture lies (SD3)."""

    size: int
    """Number of rows and of columns of the table."""

    @property
    def axes(self) -> int:
        return 2

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:  # noqa: ARG002
        """The positions [tokens, 2], float32, in the table.

        Raises:
            ValueError: the picture is larger than the table, or has several frames.
        """
        ((frames, *sides),) = grids
        if frames > 1 or max(sides) > self.size:
            raise ValueError(
                f"a sample of {frames} x {sides[0]} x {sides[1]} tokens (frames x rows x columns)"
                f" exceeds the table of positions, 1 x {self.size} x {self.size} tokens"
                " (model.max_size); use smaller pictures"
            )
        first = ((self.size - side) // 2 for side in sides)
        rows, columns = (
            torch.arange(at, at + side, dtype=torch.float32)
            for at, side in zip(first, sides, strict=True)
        )
        return torch.cartesian_prod(rows, columns)


@dataclass(frozen=True, slots=True)
class CentredPositions:
    """Positions (picture, row, column), with rows and columns counted from the centre.

    The first of h rows has position -ceil(h / 2). The target is picture 0; references are pictures
    1, 2, .... Source: `QwenEmbedRope` with `scale_rope` in Diffusers.
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
    """Positions (time, row, column) of a token's first pixel, as fractions of the largest clip.

    The largest clip has 20 s of 2048 x 2048 pixels. Positions of references start at 0, too, so
    they coincide with those of the target. The float32 operations are in the order of Diffusers'
    LTX pipelines, because the network multiplies positions by up to 15,700.
    """

    causal: bool
    """Whether the first latent frame is a single video frame (`LTXConditionPipeline`). If not, all
    latent frames have equal durations (`LTXPipeline`, `LTXImageToVideoPipeline`)."""
    patch: tuple[int, int] = (1, 1)
    """(latent frames, latent rows or columns) of a token."""

    @property
    def axes(self) -> int:
        return 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        return self.corners(grids, fps=fps) / torch.tensor(_LARGEST)

    def of_condition(self, grid: Grid, *, frame: int, fps: float) -> Tensor:
        """The positions [tokens, 3] of a conditioning picture or clip that begins at `frame`.

        `frame` is a frame of the video; it has an effect only if `causal`. Positions are fractions
        of the largest clip.
        """
        return self.corners((grid,), fps=fps, frame=frame) / torch.tensor(_LARGEST)

    def corners(self, grids: tuple[Grid, ...], *, fps: float, frame: int = 0) -> Tensor:
        """The positions [tokens, 3] in seconds, pixel rows and pixel columns.

        They are Diffusers' `video_coords`, transposed. `frame` is the frame of the video at which
        the first latent frame begins; it has an effect only if `causal`.
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
"""(video frames, pixel rows or columns) of a latent pixel of LTX-Video."""
_LARGEST = (20.0, 2048.0, 2048.0)
"""The size of the largest clip: seconds, pixel rows, pixel columns."""
_USUAL_RATE = 25.0
"""Frame rate of clips whose rate is unknown, as in LTX-Video's pipelines."""
_USUAL_RATE_OF_2 = 24.0
"""Frame rate of clips whose rate is unknown, as in LTX-2's pipelines."""


@dataclass(frozen=True, slots=True)
class CellMiddles:
    """Positions (time, row, column) of the middle of a token, as fractions of the largest clip.

    The largest clip has 20 s of 2048 x 2048 pixels. The first latent frame is a single video frame.
    Positions of references start at 0, too, so they coincide with those of the target. The float32
    operations are in the order of Diffusers' `LTX2AudioVideoRotaryPosEmbed`.
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
        """The positions [T, 1] of the middles of latent frames of sound, as fractions of 20 s.

        `index_T1` are the indices of the latent frames, and `rate` is their number per second. At
        the published rate of 25, the first latent frame is one spectrum of 10 ms, and each later
        one is 4 spectra; at other rates times are scaled by 25 / `rate`.
        """
        hop, samples = 160, 16_000
        first, last = (
            ((index_T1 + end) * 4 + 1 - 4).clamp(min=0) * hop / samples for end in (0, 1)
        )
        return (first + last) / 2 / _LARGEST[0] * (samples / hop / 4 / rate)


# Cached, because most datasets have few sizes, and this is slower than copying small results.
@lru_cache(maxsize=32)
def padded_positions(
    grids: tuple[Grid, ...], padded: int, fps: float, positions: PositionRule
) -> tuple[Tensor, Tensor]:
    """(positions [`padded`, axes] of a sample's tokens, mask [`padded`] of real tokens).

    Positions of padding are zeros. The mask is bool, False for padding. Both tensors are cached, so
    callers must not change them.
    """
    position_TA = positions(grids, fps=fps)
    padding = padded - len(position_TA)
    return pad(position_TA, (0, 0, 0, padding)), torch.arange(padded) < len(position_TA)
