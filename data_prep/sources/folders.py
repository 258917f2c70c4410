"""Media of a folder, of folders in it, and of tar archives in them."""

from __future__ import annotations

import io
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self, TypeVar

from data_prep.media.captions import (
    Caption,
    CaptionFormat,
    Captions,
    ControlPicture,
    MissingCaption,
    read_regular_file,
)
from data_prep.refusals import PrepError, Reason, RefusedError
from data_prep.sources.archives import parse_location, read_archive
from data_prep.sources.caption_tables import CaptionTables, table_format
from data_prep.sources.listing import IMAGES, Listing, list_media, media_kind_of
from data_prep.sources.masks import MaskFolder
from data_prep.sources.references import ControlFolder

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """A file that was found and is not opened yet."""

    source: str  # relative path
    where: str  # argument of `Collection.open`
    stamp: str  # changes when the file changes
    kind: str  # image or video
    captions: Callable[[], list[Caption]]
    """Returns its captions; raises RefusedError if none can be used."""


class Collection(Protocol):
    """Media of one folder or dataset. It is pickled for workers, which only call `open`."""

    @property
    def name(self) -> str: ...

    @property
    def masks(self) -> MaskFolder | None:
        """Where masks of the loss lie."""
        ...

    @property
    def controls(self) -> tuple[ControlFolder, ...]:
        """Where control pictures lie: the first of each sample, the second, and so on."""
        ...

    def media(self, ignored: Counter[str]) -> Iterator[Medium]:
        """All media, always in the same order; adds counts of other files to `ignored`."""
        ...

    def open(self, where: str) -> Path | BinaryIO:
        """The path of a file, or a stream of its content.

        Raises:
            RefusedError: it cannot be opened.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionOptions:
    """How captions are found."""

    field: str = "caption"
    format: CaptionFormat = CaptionFormat.AUTO
    missing: MissingCaption = MissingCaption.FILENAME

    @classmethod
    def of(cls, args: Namespace, missing: MissingCaption = MissingCaption.FILENAME) -> Self:
        """The options of the command line; `missing` is the default of --missing_caption."""
        return cls(
            field=args.caption_field,
            format=CaptionFormat(args.caption_format),
            missing=MissingCaption(args.missing_caption or missing),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderCollection:
    """Every medium below a folder, including those in tar archives."""

    root: Path
    captions: CaptionOptions = CaptionOptions()
    kinds: frozenset[str] = IMAGES
    option: str = "--image_dir"
    masks: MaskFolder | None = None
    """Masks of the loss; their folder holds no media, wherever it lies."""
    controls: tuple[ControlFolder, ...] = ()
    """Control pictures of edits; nor do these folders."""
    output: Path | None = None
    """Folder that is written to; its sample pictures are no media."""

    @property
    def name(self) -> str:
        return self.root.resolve().name

    def media(self, ignored: Counter[str]) -> Iterator[Medium]:
        others = [*self.controls, *([] if self.masks is None else [self.masks])]
        without = [folder.root for folder in others]
        without += [] if self.output is None else [self.output]
        listing = list_media(self.root, self.kinds, option=self.option, without=without)
        members, refused = self._unpacked(listing)
        sources = sorted({*listing.media, *(path for path in refused if self._stands_alone(path))})
        if not sources:
            raise PrepError(f"{self.option} {self.root}: its archives hold no media")
        captions = self._captions(listing, members, refused)
        if named := captions.tables.only_controls().intersection(sources):
            ignored["control picture of a table, no sample itself"] += len(named)
            sources = [source for source in sources if source not in named]
        ignored.update(listing.ignored)
        ignored.update(captions.tables.unused(self._exists(members)))
        for source in sources:
            where = members.get(source, source)
            yield Medium(
                source=source,
                where=where,
                stamp=self._stamp(where),
                kind=media_kind_of(source) or "archive",
                captions=lambda source=source: _unless(refused, source, captions.all_of),
            )

    def _unpacked(self, listing: Listing) -> tuple[dict[str, str], dict[str, RefusedError]]:
        """Adds members of archives to the listing; returns their locations, and refusals."""
        members: dict[str, str] = {}
        refused: dict[str, RefusedError] = {}
        outer = tuple(listing.archives)
        for archive in outer:
            try:
                contents = read_archive(self.root, archive)
            except RefusedError as error:
                refused[archive] = error
                continue
            listing.ignored.update(contents.ignored)
            members.update(contents.places)
            for path in (*contents.places, *contents.refused):
                listing.add(path, self.kinds)
            for path, why in contents.refused.items():
                refused[path] = RefusedError(Reason.UNREADABLE, why)
        for archive in listing.archives[len(outer) :]:
            why = "an archive in an archive is not looked into; unpack the outer one"
            refused[archive] = RefusedError(Reason.UNREADABLE, why)
        return members, refused

    def open(self, where: str) -> Path | BinaryIO:
        place = parse_location(where)
        if place is None:
            return self.root / where
        archive, start, size = place
        if not size:
            raise RefusedError(Reason.EMPTY, "0 bytes")
        return io.BytesIO(self._bytes(archive, start, size))

    def _text(self, where: str) -> bytes:
        place = parse_location(where)
        return self._bytes(*place) if place else read_regular_file(self.root / where)

    def _stands_alone(self, path: str) -> bool:
        """Whether an unreadable file is refused itself: a medium or archive, no caption file."""
        return media_kind_of(path) in self.kinds or path.lower().endswith(".tar")

    def _bytes(self, archive: str, start: int, size: int) -> bytes:
        try:
            with (self.root / archive).open("rb") as stream:
                # Checked before `size` bytes are allocated: the archive may have changed.
                if os.fstat(stream.fileno()).st_size < start + size:
                    raise RefusedError(Reason.UNREADABLE, f"{archive} is cut short")
                stream.seek(start)
                return stream.read(size)
        except OSError as error:
            raise RefusedError(Reason.UNREADABLE, f"{archive}: {error.strerror}") from error

    def _stamp(self, where: str) -> str:
        place = parse_location(where)
        try:
            status = os.stat(self.root / (place[0] if place else where))
        except OSError:
            return ""  # reading the file will report why
        return f"{status.st_size}-{status.st_mtime_ns}"

    def _control(self, path: str, members: Mapping[str, str]) -> ControlPicture:
        where = members.get(path, path)
        return ControlPicture(path, where, self._stamp(where))

    def _exists(self, members: Mapping[str, str]) -> Callable[[str], bool]:
        """A function that tells whether a relative path exists, as a file of any kind."""
        root = str(self.root)
        return lambda path: path in members or os.path.lexists(os.path.join(root, path))

    def _captions(
        self, listing: Listing, members: dict[str, str], refused: dict[str, RefusedError]
    ) -> Captions:
        def read(path: str) -> bytes:
            return _unless(refused, path, lambda path: self._text(members.get(path, path)))

        only = self.captions.format
        beside = only in (CaptionFormat.AUTO, CaptionFormat.SIDECAR)
        tables = tuple(
            path
            for path in listing.tables
            if only is CaptionFormat.AUTO or table_format(path) == only.value
        )
        media, field = listing.media, self.captions.field
        return Captions(
            root=self.root,
            sidecars=listing.sidecars if beside else {},
            field=field,
            missing=self.captions.missing,
            tables=CaptionTables(
                paths=tables,
                media=media,
                caption_field=field,
                read=read,
                root=self.root,
                control=lambda path: self._control(path, members),
            ),
            read=read,
        )


def _unless(refused: Mapping[str, RefusedError], path: str, act: Callable[[str], T]) -> T:
    """`act(path)`, unless the file was refused; raises its refusal then."""
    if path in refused:
        raise refused[path]
    return act(path)
