"""Control pictures of edit pairs: what a picture was before the edit that its caption asks for.

They lie in folders of their own, with the names of the media, or a table names them in a column
`control_path`, as in datasets of diffusion-pipe. Each becomes a reference latent of its sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

from PIL import Image

from data_prep.media.captions import ControlPicture
from data_prep.media.clips import PlannedReference
from data_prep.media.images import open_image, probe_image, to_rgb
from data_prep.media.resizing import Buckets, Fit, Placement, ResizeMode
from data_prep.refusals import Reason, RefusedError
from data_prep.sources.listing import IMAGES, name_of
from dit.codecs.rgb import ReferenceFit, is_transparent

FOLDER = -1
"""`PlannedReference.folder` of a picture in the folder of the media, which a table names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRule:
    """Size of a control picture -> size that is encoded."""

    kind: ReferenceFit = ReferenceFit.TARGET
    own: Fit = Fit(size_multiple=1, max_pixels=None)  # noqa: RUF009  # it is frozen
    """Whole patches, and the pixel budget of the media, if there is one."""
    published: Callable[[int, int], tuple[int, int]] | None = None
    """(width, height) -> those of the pipeline, which stretches pictures to them."""
    center_crop: bool = True

    def place(self, size: tuple[int, int], target: tuple[int, int]) -> Placement:
        """Where a picture of `size` (width, height) comes beside a target of the size `target`.

        Raises:
            RefusedError: it is smaller than a patch.
        """
        match self.kind:
            case ReferenceFit.OWN:
                return self.own.place(*size)
            case ReferenceFit.TARGET:
                return Buckets(sizes=(target,), center_crop=self.center_crop).place(*size)
            case ReferenceFit.PUBLISHED:
                assert self.published is not None
                wanted = self.published(*size)
                return Placement(wanted, wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlFolder:
    """A folder of control pictures at the relative paths of their media, whatever the endings."""

    root: Path
    option: str = "--control_dir"
    what: ClassVar[str] = "control picture"
    kinds: ClassVar[frozenset[str]] = IMAGES

    def picture(self, path: str | None, source: str) -> ControlPicture:
        """The picture at `path`, which belongs to the medium `source`.

        Raises:
            RefusedError: there is none.
        """
        if path is None:
            named = f"{self.root.name}/{name_of(source)} with the ending of a picture"
            raise RefusedError(Reason.NO_REFERENCE, f"there is no {named} ({self.option})")
        status = (self.root / path).stat()
        return ControlPicture(path, path, f"{status.st_size}-{status.st_mtime_ns}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundReference:
    """A control picture whose size is known."""

    folder: int
    picture: ControlPicture
    size: tuple[int, int]  # width, height, upright
    has_alpha: bool

    def planned(self, rule: ReferenceRule, target: tuple[int, int]) -> PlannedReference:
        """How it is encoded beside a target of this size.

        Raises:
            RefusedError: it is smaller than a patch.
        """
        try:
            place = rule.place(self.size, target)
        except RefusedError as error:
            raise _unusable(self.picture.name, error) from error
        return PlannedReference(
            name=self.picture.name,
            folder=self.folder,
            where=self.picture.where,
            stamp=self.picture.stamp,
            resized=place.resized,
            size=place.size,
        )


def find(
    folder: int, picture: ControlPicture, open_file: Callable[[str], Path | BinaryIO]
) -> FoundReference:
    """The picture with its size, from its header.

    Raises:
        RefusedError: it is not there, or no picture that can be read.
    """
    if not picture.stamp:
        raise RefusedError(Reason.NO_REFERENCE, f"there is no {picture.name}")
    try:
        size, _, has_alpha = probe_image(open_file(picture.where))
        return FoundReference(folder=folder, picture=picture, size=size, has_alpha=has_alpha)
    except RefusedError as error:
        raise _unusable(picture.name, error) from error


class ReadReference(NamedTuple):
    """A control picture, RGB."""

    placed: Image.Image  # as it is encoded
    original: Image.Image  # upright, before it is scaled and cropped
    is_transparent: bool  # in its file


def read(
    planned: PlannedReference, file: Path | BinaryIO, mode: ResizeMode, background: str
) -> ReadReference:
    """The picture, on `background` where it is transparent.

    Raises:
        RefusedError: it cannot be decoded.
    """
    try:
        found = open_image(file)
        original = to_rgb(found, background)
    except RefusedError as error:
        raise _unusable(planned.name, error) from error
    placed = Placement(planned.resized, planned.size).apply(original, mode.filter)
    return ReadReference(placed, original, is_transparent(found))


def _unusable(name: str, error: RefusedError) -> RefusedError:
    return RefusedError(Reason.BAD_REFERENCE, f"{name}: {error.reason} ({error.detail})")
