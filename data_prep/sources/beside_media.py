"""Files that belong to media by name, in separate folders: controls, rejected partners, masks.

1. Controls of edit pairs: the picture or video before the edit that the caption describes. A table
   may name them instead, in a column `control_path`, as in datasets of diffusion-pipe. Each
   becomes a reference latent of its sample; a video has the frames that its sample has
2. Rejected partners for learning from preferences, of the same size and kind as the preferred
   sample, scaled and cropped alike. A table may name them, too, in a column `rejected_path`
3. Masks of the loss, pictures or videos: white counts fully, black not at all, grey in between.
   They are scaled and cropped like their medium, then averaged over each latent cell
"""

# F frames, H rows, W columns: of pixels, or f h w of the cells of a latent

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data_prep.media.captions import ControlPicture
from data_prep.media.clips import Entry, PlannedMask, PlannedReference
from data_prep.media.frame_selection import KeptFrames
from data_prep.media.images import open_image, probe_image, to_8_bits, to_rgb, to_rgba
from data_prep.media.resizing import Buckets, Fit, Placement, ResizeMode
from data_prep.media.videos import Timeline, VideoDecoder, timeline
from data_prep.refusals import Reason, RefusedError
from data_prep.sources.listing import BOTH, media_kind_of, name_of, stamp_of
from dit.codecs.rgb import ReferenceFit, is_transparent
from dit.system_errors import reason

FOLDER = -1
"""Value of `PlannedReference.folder` for a picture named by a table, in the folder of the media."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRule:
    """Rule for the size at which control pictures are encoded."""

    kind: ReferenceFit = ReferenceFit.TARGET
    own: Fit = Fit(size_multiple=1, max_pixels=None)  # noqa: RUF009  # it is frozen
    """Rule of size `own`: whole patches, within the pixel budget of the media."""
    published: Callable[[int, int], tuple[int, int]] | None = None
    """(width, height) -> size in the processor's pipeline, to which it stretches pictures."""
    crops: bool = False
    """Whether the pipeline then crops to whole patches."""
    center_crop: bool = True

    def place(self, size: tuple[int, int], target: tuple[int, int]) -> Placement:
        """Scaling and crop of a control picture of `size` (width, height) beside a `target`.

        Raises:
            RefusedError: the picture is smaller than a patch.
        """
        match self.kind:
            case ReferenceFit.OWN:
                return self.own.place(*size)
            case ReferenceFit.TARGET:
                return Buckets(sizes=(target,), center_crop=self.center_crop).place(*size)
            case ReferenceFit.PUBLISHED:
                assert self.published is not None
                wanted = self.published(*size)
                if not self.crops:
                    return Placement(wanted, wanted)
                return Fit(size_multiple=self.own.size_multiple, max_pixels=None).place(*wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlFolder:
    """Folder of control pictures or videos, at the relative paths of their media.

    Endings may differ. The control of a picture is a picture; that of a video may be either.
    """

    root: Path
    option: str = "--control_dir"
    what: ClassVar[str] = "control picture or video"
    kinds: ClassVar[frozenset[str]] = BOTH
    missing: ClassVar[Reason] = Reason.NO_REFERENCE

    def picture(self, path: str | None, source: str) -> ControlPicture:
        """The control at `path`, for the medium `source`.

        Raises:
            RefusedError: there is none.
        """
        if path is None:
            kind = "picture or video" if media_kind_of(source) == "video" else "picture"
            named = f"{self.root.name}/{name_of(source)} with the ending of a {kind}"
            raise RefusedError(self.missing, f"there is no {named} ({self.option}); add the file")
        return ControlPicture(path, path, stamp_of(self.root / path))


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedFolder(ControlFolder):
    """Folder of rejected samples, at the relative paths of the preferred ones."""

    option: str = "--rejected_dir"
    what: ClassVar[str] = "rejected picture or video"
    missing: ClassVar[Reason] = Reason.NO_REJECTED


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundReference:
    """An opened control picture or video, with its size."""

    folder: int
    picture: ControlPicture
    size: tuple[int, int]  # width, height, upright
    has_alpha: bool
    flaws: tuple[str, ...]  # why it does not look as it should
    line: Timeline | None = None  # of a video

    def planned(
        self, rule: ReferenceRule, target: tuple[int, int], clip: Timeline | None, kept: KeptFrames
    ) -> PlannedReference:
        """Plan for encoding the reference beside its target, with the frames `kept` of `clip`.

        Raises:
            RefusedError: it is smaller than a patch, or a video that does not fit the target.
        """
        try:
            return self.placed(rule.place(self.size, target), clip, kept)
        except RefusedError as error:
            raise _refused(Reason.BAD_REFERENCE, self.picture.name, error) from error

    def placed(self, place: Placement, clip: Timeline | None, kept: KeptFrames) -> PlannedReference:
        """Plan for encoding the reference at `place` (scaling and crop), with the frames `kept`.

        Raises:
            RefusedError: it is a video that does not fit the clip.
        """
        keep = () if self.line is None else self._same_frames(self.line, clip, kept)
        planned = PlannedReference(
            name=self.picture.name,
            folder=self.folder,
            where=self.picture.where,
            stamp=self.picture.stamp,
            resized=place.resized,
            size=place.size,
        )
        if self.line is None:
            return planned
        return replace(
            planned,
            of_file=self.size,
            keep=keep,
            tick=str(self.line.tick),
            numbers=self.line.numbers_of(keep) if self.line.by_number else (),
        )

    def _same_frames(
        self, own: Timeline, clip: Timeline | None, kept: KeptFrames
    ) -> tuple[int, ...]:
        """This reference's frames at the clip's times, or with the same indices.

        Indices count if both files have equally many frames.

        Raises:
            RefusedError: it ends before the clip does, or belongs to a picture.
        """
        if clip is None:
            raise RefusedError(Reason.BAD_REFERENCE, "it is a video, and its sample a picture")
        if own.counts_as(clip):
            return tuple(own.shown[number] for number in clip.numbers_of(kept.shown))
        seconds = [(at - clip.shown[0]) * clip.tick for at in kept.shown]
        if float(seconds[-1]) >= own.duration:
            raise RefusedError(
                Reason.TOO_SHORT,
                f"it ends after {own.duration:.2f} s, and its sample has a frame at"
                f" {float(seconds[-1]):.2f} s; give both the same length",
            )
        times = (own.shown[0] + at / own.tick + Fraction(own.rounding) for at in seconds)
        return tuple(own.shown[bisect.bisect_right(own.shown, at) - 1] for at in times)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPartner:
    """The rejected sample of a medium, which must have the same size and kind."""

    found: FoundReference

    @classmethod
    def of(
        cls,
        folder: int,
        picture: ControlPicture,
        open_file: Callable[[str], Path | BinaryIO],
        size: tuple[int, int],
        line: Timeline | None,
    ) -> Self:
        """The rejected partner `picture` of a medium of `size` (width, height); `line` for clips.

        Raises:
            RefusedError: it is not there, cannot be read, or is of another size or kind.
        """
        if not picture.stamp:
            raise RefusedError(Reason.NO_REJECTED, _not_there(picture))
        try:
            found = find_reference(folder, picture, open_file)
        except RefusedError as error:
            raise RefusedError(Reason.BAD_REJECTED, error.detail) from error
        name = picture.name
        kinds = ["a picture" if one is None else "a video" for one in (found.line, line)]
        if kinds[0] != kinds[1]:
            why = f"{name} is {kinds[0]}, and its preferred one {kinds[1]}; give both the same kind"
            raise RefusedError(Reason.BAD_REJECTED, why)
        if found.size != size:
            sizes = [f"{wide} x {high}" for wide, high in (found.size, size)]
            why = f"{name} has {sizes[0]} pixels, and its preferred one {sizes[1]}"
            raise RefusedError(Reason.BAD_REJECTED, f"{why}; give both the same size")
        return cls(found=found)

    def planned(
        self, place: Placement, clip: Timeline | None, kept: KeptFrames
    ) -> PlannedReference:
        """Plan for encoding the rejected sample like its medium, with the frames `kept` of `clip`.

        Raises:
            RefusedError: it ends before the clip does.
        """
        try:
            return self.found.placed(place, clip, kept)
        except RefusedError as error:
            raise _refused(Reason.BAD_REJECTED, self.found.picture.name, error) from error


def _not_there(picture: ControlPicture) -> str:
    return (
        f"there is no {picture.name} below the folder of the media, and a table names it; restore"
        " the file, or correct the table"
    )


def find_reference(
    folder: int, picture: ControlPicture, open_file: Callable[[str], Path | BinaryIO]
) -> FoundReference:
    """`picture` with its size, from its header; for a video also the times of its frames.

    Raises:
        RefusedError: the file does not exist, or is neither a picture nor a video.
    """
    if not picture.stamp:
        raise RefusedError(Reason.NO_REFERENCE, _not_there(picture))
    found: dict[str, Any] = {"folder": folder, "picture": picture}
    try:
        file = open_file(picture.where)
        if media_kind_of(picture.name) == "video":
            line = timeline(file).steady()
            size, has_alpha = (line.width, line.height), line.has_alpha
            return FoundReference(
                **found, size=size, has_alpha=has_alpha, flaws=line.flaws, line=line
            )
        size, _, has_alpha, flaws = probe_image(file)
        return FoundReference(**found, size=size, has_alpha=has_alpha, flaws=flaws)
    except RefusedError as error:
        raise _refused(Reason.BAD_REFERENCE, picture.name, error) from error


class ReadReference(NamedTuple):
    """A decoded control picture or video: scaled, and its first frame at full size."""

    placed: list[Image.Image]  # its frames as they are encoded, RGB or RGBA
    original: Image.Image  # the first one, upright, before it is scaled and cropped
    is_transparent: bool  # in its file


def read_reference(
    planned: PlannedReference,
    file: Path | BinaryIO,
    mode: ResizeMode,
    background: str | None,
    decoder: VideoDecoder,
) -> ReadReference:
    """The decoded control, on `background` if transparent, or RGBA if that is None.

    Raises:
        RefusedError: it cannot be decoded.
    """
    place, placed, first, is_clear = Placement(planned.resized, planned.size), [], None, False
    try:
        for found in _frames_of(planned, file, decoder):
            original = to_rgba(found) if background is None else to_rgb(found, background)
            first = original if first is None else first
            placed.append(place.apply(original, mode.filter))
            is_clear |= is_transparent(found)
    except RefusedError as error:
        raise _refused(Reason.BAD_REFERENCE, planned.name, error) from error
    assert first is not None, "a control has frames"
    return ReadReference(placed, first, is_clear)


def _frames_of(
    planned: PlannedReference, file: Path | BinaryIO, decoder: VideoDecoder
) -> Iterator[Image.Image]:
    if planned.of_file is None:
        return iter([open_image(file)])
    width, height = planned.of_file
    shown = {"keep": planned.keep, "tick": planned.tick, "numbers": planned.numbers}
    entry = Entry(key="", source=planned.name, width=width, height=height, **shown)
    return decoder.frames(file, entry)


class CellSize(NamedTuple):
    """Size of a latent cell in pixels: side, and frames."""

    side: int
    frames: int  # in each latent frame but the first, which has one


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMask:
    """An opened loss mask of a medium."""

    path: str  # in its folder
    stamp: str  # changes when the file changes
    line: Timeline | None  # of a video

    def planned(self, line: Timeline | None, window: KeptFrames) -> PlannedMask:
        """Plan for reading the mask, for the frames `window` of its medium."""
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
    """A folder of masks, each at the relative path of its medium, whatever the file ending."""

    root: Path
    option: str = "--mask_dir"
    what: ClassVar[str] = "mask"
    kinds: ClassVar[frozenset[str]] = BOTH

    def find(self, path: str, size: tuple[int, int], line: Timeline | None) -> FoundMask:
        """The mask at `path` of a medium of `size` (width, height); `line` for videos.

        Raises:
            RefusedError: it cannot be read, or has another size or number of frames.
        """
        try:
            stamp = stamp_of(self.root / path)
            of_mask, own = self._probe(path)
        except RefusedError as error:
            raise _refused(Reason.BAD_MASK, path, error) from error
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
        """Weight of each cell of the sample's latent [1, f, h, w] in [0, 1]; None for no mask.

        Raises:
            RefusedError: it cannot be decoded.
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
            raise _refused(Reason.BAD_MASK, mask.path, error) from error
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
    """Mean of each cell [h, w] in [0, 1], from the red channel as in diffusion-pipe."""
    grey = to_8_bits(picture).convert("RGB").getchannel("R")
    placed = place.apply(grey, Image.Resampling.BOX)
    weight_HW = torch.from_numpy(np.array(placed)).float() / 255
    return torch.nn.functional.avg_pool2d(weight_HW[None], side)[0]


def _refused(reason: Reason, path: str, error: RefusedError) -> RefusedError:
    return RefusedError(reason, f"{path}: {error.reason} ({error.detail})")
