"""Reads the loss mask of a picture or video, as a weight for each latent cell.

White counts fully, black not at all, grey in between. A mask is scaled and cropped like its medium,
then averaged over each latent cell.
"""

# H rows and W columns of pixels; f h w frames, rows and columns of a latent

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data_prep.media.clips import Entry, PlannedMask
from data_prep.media.frame_selection import KeptFrames
from data_prep.media.images import open_image, probe_image, to_8_bits
from data_prep.media.resizing import Placement
from data_prep.media.videos import Timeline, VideoDecoder, timeline
from data_prep.refusals import Reason, RefusedError
from data_prep.sources.beside_media import refused_beside
from data_prep.sources.listing import BOTH, media_kind_of, stamp_of
from dit.system_errors import reason


class CellSize(NamedTuple):
    """Size of a latent cell: pixels along a side, and frames."""

    side: int
    frames: int  # in each latent frame but the first, which has one


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMask:
    """The loss mask of a medium, which was opened and fits the medium."""

    path: str  # in its folder
    stamp: str  # changes when the file changes
    line: Timeline | None  # of a video

    def planned(self, line: Timeline | None, window: KeptFrames) -> PlannedMask:
        """Plans the frames of the mask that belong to the frames `window` of a medium.

        `line` is the medium's timeline, or None for a picture. A mask that is a picture holds for
        all frames.
        """
        mask = PlannedMask(path=self.path, stamp=self.stamp)
        if self.line is None or line is None:
            return mask
        numbers = line.numbers_of(window.shown)
        return replace(
            mask,
            keep=tuple(self.line.shown[number] for number in numbers),
            tick=str(self.line.tick),
            numbers=numbers if self.line.by_number else (),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskFolder:
    """A folder of loss masks, each at the relative path of its medium, with any file ending."""

    root: Path
    option: str = "--mask_dir"
    what: ClassVar[str] = "mask"
    kinds: ClassVar[frozenset[str]] = BOTH

    def find(self, path: str, size: tuple[int, int], line: Timeline | None) -> FoundMask:
        """Opens the mask at `path` and checks that it fits its medium.

        `size` is the medium's (width, height) in pixels, and `line` its timeline if it is a video.

        Raises:
            RefusedError: the mask cannot be read, or has another size or number of frames.
        """
        try:
            stamp = stamp_of(self.root / path)
            of_mask, own = self._probe(path)
        except RefusedError as error:
            raise refused_beside(Reason.BAD_MASK, path, error) from error
        except OSError as error:
            raise RefusedError(Reason.BAD_MASK, f"{path}: {reason(error)}") from error
        of = "picture" if line is None else "video"
        if own != size:
            sizes = f"{own[0]} x {own[1]} pixels, and its {of} {size[0]} x {size[1]}"
            why = f"{path}: it has {sizes}; give both the same size"
            raise RefusedError(Reason.BAD_MASK, why)
        frames = 1 if line is None else len(line.shown)
        if of_mask is not None and not of_mask.counts_as(line):
            counts = f"{len(of_mask.shown)} frames, and its {of} {frames}"
            why = f"{path}: it has {counts}; give as many, or a picture for all frames"
            raise RefusedError(Reason.BAD_MASK, why)
        return FoundMask(path=path, stamp=stamp, line=None if line is None else of_mask)

    def _probe(self, path: str) -> tuple[Timeline | None, tuple[int, int]]:
        if media_kind_of(path) == "image":
            return None, probe_image(self.root / path).size
        line = timeline(self.root / path).steady()
        return line, (line.width, line.height)

    def read(
        self, entry: Entry, place: Placement, cell: CellSize, decoder: VideoDecoder
    ) -> Tensor | None:
        """The loss weight in [0, 1] of each cell of a sample's latent, as a tensor [1, f, h, w].

        None if the sample has no mask.

        Raises:
            RefusedError: the mask cannot be decoded.
        """
        mask = entry.mask
        if mask is None:
            return None
        frames = max(1, len(entry.keep))
        try:
            cells_fhw = torch.stack(
                [_cells(place, picture, cell.side) for picture in self._pictures(entry, decoder)]
            )
        except RefusedError as error:
            raise refused_beside(Reason.BAD_MASK, mask.path, error) from error
        if not mask.keep:  # one picture for all frames
            return cells_fhw.expand(1 + (frames - 1) // cell.frames, -1, -1)[None].contiguous()
        later_fhw = cells_fhw[1:].unflatten(0, (-1, cell.frames)).mean(1) if frames > 1 else None
        first_fhw = cells_fhw[:1]
        return (first_fhw if later_fhw is None else torch.cat([first_fhw, later_fhw]))[None]

    def _pictures(self, entry: Entry, decoder: VideoDecoder) -> Iterator[Image.Image]:
        mask, file = entry.mask, self.root / (entry.mask.path if entry.mask else "")
        assert mask is not None
        if media_kind_of(mask.path) == "image":
            yield open_image(file)
        else:
            keep, numbers = mask.keep or (timeline(file).shown[0],), mask.numbers
            of_mask = replace(entry, keep=keep, numbers=numbers, tick=mask.tick or entry.tick)
            yield from decoder.frames(file, of_mask)


def _cells(place: Placement, picture: Image.Image, side: int) -> Tensor:
    """Mean weight of each latent cell [h, w] in [0, 1]; `side` is a cell's side in pixels.

    Only the red channel is read, as in diffusion-pipe.
    """
    grey = to_8_bits(picture).convert("RGB").getchannel("R")
    placed = place.apply(grey, Image.Resampling.BOX)
    weight_HW = torch.from_numpy(np.array(placed)).float() / 255
    return torch.nn.functional.avg_pool2d(weight_HW[None], side)[0]
