"""Reads control pictures and rejected samples, which belong to media by name.

1. A control is the picture or video before the edit that the caption describes. It has the relative
   path of its medium in another folder, or a table names it in a column `control_path`, as in
   datasets of diffusion-pipe. It becomes a reference latent of the sample; a control video gets
   the same frames as the sample
2. A rejected sample is the worse one of a preference pair. It has the size and kind of the
   preferred sample, and is scaled and cropped alike. A table may name it in a column
   `rejected_path`
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

from PIL import Image

from data_prep.media.captions import ControlPicture
from data_prep.media.clips import Entry, PlannedReference
from data_prep.media.frame_selection import KeptFrames
from data_prep.media.images import open_image, probe_image, to_rgb, to_rgba
from data_prep.media.resizing import Buckets, Fit, Placement, ResizeMode
from data_prep.media.videos import Timeline, VideoDecoder, timeline
from data_prep.refusals import Reason, RefusedError
from data_prep.sources.listing import BOTH, media_kind_of, name_of, stamp_of
from dit.codecs.rgb import ReferenceFit, is_transparent

FOLDER = -1
"""Value of `PlannedReference.folder` for a picture in the folder of the media, named by a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRule:
    """The rule that decides the size at which control pictures are encoded."""

    kind: ReferenceFit = ReferenceFit.TARGET
    own: Fit = Fit(size_multiple=1, max_pixels=None)  # noqa: RUF009  # it is frozen
    """Rule for `kind` own: whole patches, within the pixel budget of the media."""
    published: Callable[[int, int], tuple[int, int]] | None = None
    """Maps (width, height) to the size to which the processor's pipeline stretches a control
    picture; None if it has no rule."""
    crops: bool = False
    """Whether the processor's pipeline then crops to whole patches."""
    center_crop: bool = True

    def place(self, size: tuple[int, int], target: tuple[int, int]) -> Placement:
        """How a control picture of `size` is scaled and cropped, for a sample of size `target`.

        Sizes are (width, height) in pixels.

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
    """A folder of control pictures or videos, which have the same relative paths as their media.

    File endings may differ. The control of a picture is a picture; that of a video may be either.
    """

    root: Path
    option: str = "--control_dir"
    what: ClassVar[str] = "control picture or video"
    kinds: ClassVar[frozenset[str]] = BOTH
    missing: ClassVar[Reason] = Reason.NO_REFERENCE

    def picture(self, path: str | None, source: str) -> ControlPicture:
        """The control at `path` for the medium `source`.

        Raises:
            RefusedError: `path` is None, as there is no such file.
        """
        if path is None:
            kind = "picture or video" if media_kind_of(source) == "video" else "picture"
            named = f"{self.root.name}/{name_of(source)} with the ending of a {kind}"
            raise RefusedError(self.missing, f"there is no {named} ({self.option}); add the file")
        return ControlPicture(path, path, stamp_of(self.root / path))


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedFolder(ControlFolder):
    """A folder of rejected samples, which have the same relative paths as the preferred ones."""

    option: str = "--rejected_dir"
    what: ClassVar[str] = "rejected picture or video"
    missing: ClassVar[Reason] = Reason.NO_REJECTED


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundReference:
    """A control or rejected picture or video that was opened, and what its header says."""

    folder: int
    picture: ControlPicture
    size: tuple[int, int]  # width, height, upright
    has_alpha: bool
    flaws: tuple[str, ...]  # why it does not look as it should
    line: Timeline | None = None  # of a video

    def planned(
        self, rule: ReferenceRule, target: tuple[int, int], clip: Timeline | None, kept: KeptFrames
    ) -> PlannedReference:
        """How the reference is encoded with a target of size `target` (width, height).

        If the reference is a video, its frames that go with the frames `kept` of the target's
        `clip` are used.

        Raises:
            RefusedError: the reference is smaller than a patch, or is a video that does not fit the
                target.
        """
        try:
            return self.placed(rule.place(self.size, target), clip, kept)
        except RefusedError as error:
            raise refused_beside(Reason.BAD_REFERENCE, self.picture.name, error) from error

    def placed(self, place: Placement, clip: Timeline | None, kept: KeptFrames) -> PlannedReference:
        """How the reference is encoded if it is scaled and cropped as `place` says.

        If the reference is a video, its frames that go with the frames `kept` of the target's
        `clip` are used.

        Raises:
            RefusedError: the reference is a video that does not fit the clip.
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
        """Times of the frames of the video `own` that go with the frames `kept` of `clip`.

        If both files have equally many frames, they are the frames with the same indices; else the
        frames that are shown at the same time.

        Raises:
            RefusedError: this video ends before the clip does, or its target is a picture.
        """
        if clip is None:
            raise RefusedError(
                Reason.BAD_REFERENCE, "it is a video, and its sample a picture; give a picture"
            )
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
    """The rejected sample of a medium, which has the medium's size and kind."""

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
        """Opens the rejected sample `picture` of a medium and checks it.

        `size` is the medium's (width, height), and `line` its timeline if it is a video.

        Raises:
            RefusedError: the rejected sample is missing, cannot be read, or has another size or
                kind.
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
        """How the rejected sample is encoded: scaled and cropped like the preferred one.

        Raises:
            RefusedError: the sample is a video that ends before the preferred one does.
        """
        try:
            return self.found.placed(place, clip, kept)
        except RefusedError as error:
            raise refused_beside(Reason.BAD_REJECTED, self.found.picture.name, error) from error


def _not_there(picture: ControlPicture) -> str:
    return (
        f"there is no {picture.name} below the folder of the media, and a table names it; restore"
        " the file, or correct the table"
    )


def find_reference(
    folder: int, picture: ControlPicture, open_file: Callable[[str], Path | BinaryIO]
) -> FoundReference:
    """Opens `picture`, and reads its size; of a video also the times of its frames.

    `folder` is the number of the folder of controls that it is in. `open_file` opens
    `picture.where`.

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
        raise refused_beside(Reason.BAD_REFERENCE, picture.name, error) from error


class ReadReference(NamedTuple):
    """A decoded control picture or video: its scaled frames, and its first frame at full size."""

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
    """Decodes and scales the control or rejected sample `planned` from `file`.

    Transparent pixels are put on `background`, or kept as RGBA if that is None.

    Raises:
        RefusedError: the file cannot be decoded.
    """
    place, placed, first, is_clear = Placement(planned.resized, planned.size), [], None, False
    try:
        for found in _frames_of(planned, file, decoder):
            original = to_rgba(found) if background is None else to_rgb(found, background)
            first = original if first is None else first
            placed.append(place.apply(original, mode.filter))
            is_clear |= is_transparent(found)
    except RefusedError as error:
        raise refused_beside(Reason.BAD_REFERENCE, planned.name, error) from error
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


def refused_beside(reason: Reason, path: str, error: RefusedError) -> RefusedError:
    return RefusedError(reason, f"{path}: {error.reason} ({error.detail})")
