"""A folder of media, with folders and tar archives in it."""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from data_prep.captions import Caption, CaptionFormat, Captions, MissingCaption
from data_prep.refusals import PrepError, Reason, RefusedError
from data_prep.sources.caption_tables import CaptionTables, table_format
from data_prep.sources.listing import IMAGES, Listing, kind_of, list_media


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """One file that was found and not yet opened."""

    source: str  # relative path
    where: str  # what `Collection.open` takes
    stamp: str  # changes when the file changes
    kind: str  # image or video
    captions: Callable[[], list[Caption]]
    """Raises RefusedError where there are none that can be used."""


class Collection(Protocol):
    """Media of one place; pickled to workers, which call `open` alone."""

    @property
    def name(self) -> str: ...

    def media(self, ignored: Counter[str]) -> Iterator[Medium]:
        """All of them, in an order that is always the same."""
        ...

    def open(self, where: str) -> Path | BinaryIO:
        """A path, or a stream of its content.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderCollection:
    """Every medium below a folder, those inside its tar archives included."""

    root: Path
    captions: CaptionOptions = CaptionOptions()
    kinds: frozenset[str] = IMAGES
    option: str = "--image_dir"

    @property
    def name(self) -> str:
        return self.root.resolve().name

    def media(self, ignored: Counter[str]) -> Iterator[Medium]:
        listing = list_media(self.root, self.kinds, option=self.option)
        members = {}
        for archive in listing.archives:
            members.update(_members(self.root, archive, listing, self.kinds))
        listing.media.sort()
        if not listing.media:
            raise PrepError(f"{self.option} {self.root}: its archives hold no media")
        ignored.update(listing.ignored)
        captions = self._captions(listing, members)
        for source in listing.media:
            where = members.get(source, source)
            yield Medium(
                source=source,
                where=where,
                stamp=self._stamp(where),
                kind=kind_of(source) or "image",
                captions=lambda source=source: captions.all_of(source),
            )

    def open(self, where: str) -> Path | BinaryIO:
        archive, start, size = _split(where)
        if not size:
            return self.root / where
        try:
            with (self.root / archive).open("rb") as stream:
                stream.seek(start)
                content = stream.read(size)
        except OSError as error:
            raise RefusedError(Reason.UNREADABLE, f"{archive}: {error.strerror}") from error
        if len(content) < size:
            raise RefusedError(Reason.UNREADABLE, f"{archive} is cut short")
        return io.BytesIO(content)

    def _stamp(self, where: str) -> str:
        try:
            status = os.stat(self.root / _split(where)[0])
        except OSError:
            return ""  # opening it will say why
        return f"{status.st_size}-{status.st_mtime_ns}"

    def _captions(self, listing: Listing, members: dict[str, str]) -> Captions:
        def read(path: str) -> bytes:
            file = self.open(members.get(path, path))
            return file.read_bytes() if isinstance(file, Path) else file.read()

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
            tables=CaptionTables(paths=tables, media=media, caption_field=field, read=read),
            read=read,
        )


def _split(where: str) -> tuple[str, int, int]:
    """Archive, first byte and size; for a plain file its path and two zeros."""
    archive, _, rest = where.rpartition("\n")
    if not archive:
        return where, 0, 0
    start, _, size = rest.partition("+")
    return archive, int(start), int(size)


def _members(
    root: Path, archive: str, listing: Listing, kinds: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Adds what an archive holds to the listing, as if it were a folder; yields path and place."""
    try:
        with tarfile.open(root / archive, "r:") as tar:
            for member in tar:
                if member.isreg() and member.size:
                    path = f"{archive}/{member.name.removeprefix('./')}"
                    listing.add(path, kinds)
                    yield path, f"{archive}\n{member.offset_data}+{member.size}"
                tar.members = []  # type: ignore[attr-defined] # a million would stay in memory
    except (tarfile.TarError, OSError) as error:
        raise PrepError(f"{root / archive} is no whole uncompressed tar ({error})") from error
