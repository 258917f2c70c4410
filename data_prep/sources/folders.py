"""Finds the media in a folder and its subfolders, also inside of tar archives."""

from __future__ import annotations

import io
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, Self, TypeVar

from data_prep.media.captions import (
    SIDECAR_ENDINGS,
    Caption,
    CaptionFormat,
    Captions,
    ControlPicture,
    MissingCaption,
    read_regular_file,
)
from data_prep.media.name_matching import UNCLEAR, composed, match
from data_prep.refusals import PrepError, Reason, RefusedError
from data_prep.sources.archives import parse_location, read_archive
from data_prep.sources.beside_media import ControlFolder, RejectedFolder
from data_prep.sources.caption_tables import CaptionTables, table_format
from data_prep.sources.listing import (
    IMAGES,
    OF_SYSTEMS,
    Elsewhere,
    Ignored,
    Listing,
    list_media,
    media_kind_of,
    name_of,
    stamp_of,
)
from data_prep.sources.loss_masks import MaskFolder
from dit.system_errors import reason

T = TypeVar("T")
_LINES = ("prompts.txt", "prompt.txt", "captions.txt", "videos.txt", "images.txt")
_LINES_REMEDY = (
    "file of finetrainers with a line for each medium, which is not read (write the lines of both"
    " files into a table metadata.csv with the columns file_name,text)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """A picture or video that has been found but not opened."""

    source: str  # relative path
    where: str  # argument of `Collection.open`
    stamp: str  # changes when the file changes
    kind: str  # image or video
    captions: Callable[[], list[Caption]]
    """Returns the captions, and raises RefusedError if none can be used."""
    mask: str | None = None  # in the folder of masks
    controls: tuple[str | None, ...] = ()  # in each folder of control pictures
    rejected: str | None = None  # in the folder of rejected media


class Collection(Protocol):
    """Interface of a collection of media: one folder or one dataset.

    It is pickled for worker processes, which only call `open`.
    """

    @property
    def name(self) -> str: ...

    @property
    def masks(self) -> MaskFolder | None:
        """The folder of loss masks; None if there is none."""
        ...

    @property
    def controls(self) -> tuple[ControlFolder, ...]:
        """Folders of control pictures, in the order of a sample's controls."""
        ...

    @property
    def rejected(self) -> RejectedFolder | None:
        """The folder of rejected samples; None if there is none."""
        ...

    def media(self, ignored: Ignored) -> Iterator[Medium]:
        """Yields all media in a fixed order, and counts the other files in `ignored`."""
        ...

    def open(self, where: str) -> Path | BinaryIO:
        """Opens the medium or file at `where`: returns its path, or a stream of its content.

        Raises:
            RefusedError: the file cannot be opened.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionOptions:
    """Options that decide how captions are found."""

    field: str = "caption"
    format: CaptionFormat = CaptionFormat.AUTO
    missing: MissingCaption = MissingCaption.FILENAME

    @classmethod
    def of(cls, args: Namespace, missing: MissingCaption = MissingCaption.FILENAME) -> Self:
        """The caption options in `args`; `missing` is the default of --missing_caption."""
        return cls(
            field=args.caption_field,
            format=CaptionFormat(args.caption_format),
            missing=MissingCaption(args.missing_caption or missing),
        )


def _beside(
    folder: MaskFolder | ControlFolder | RejectedFolder, sources: Sequence[str], ignored: Ignored
) -> Mapping[str, str]:
    """Maps the relative path of each medium, without its ending, to its file in `folder`.

    `sources` are the media. Files in `folder` that belong to no medium are counted in `ignored`.

    Raises:
        PrepError: the folder is missing or holds no pictures, videos or archives, or two of its
            files belong to the same medium.
    """
    option, root, what = folder.option, folder.root, folder.what
    listing, files = list_media(root, folder.kinds, option=option), dict[str, str]()
    for path in listing.media:
        other = files.setdefault(name_of(path), path)
        if other != path:
            raise PrepError(
                f"{option} {root}: {other} and {path} are both the {what} of one file; remove one"
            )
    # Set, not added: several inputs may share the folder.
    for kind, count in listing.ignored.items():
        ignored.counts[f"{kind} in {option}"] = count
    for kind, paths in (("caption file", listing.sidecars), (".tar", listing.archives)):
        if paths:
            ignored.counts[f"{kind} in {option}, which is not read there"] = len(paths)
    found = match(files, lambda: ((name_of(source),) for source in sources))
    ignored.add_unused(f"{what} of no file", root, found.spare)
    ignored.add_unused(f"{what} {UNCLEAR}", root, found.unclear)
    return found.by_name


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderCollection:
    """The media below a folder, also in tar archives."""

    root: Path
    captions: CaptionOptions = CaptionOptions()
    kinds: frozenset[str] = IMAGES
    option: str = "--image_dir"
    masks: MaskFolder | None = None
    """Folder of loss masks, whose files are not listed as media."""
    controls: tuple[ControlFolder, ...] = ()
    """Folders of control pictures, whose files are not listed as media."""
    rejected: RejectedFolder | None = None
    """Folder of rejected samples, whose files are not listed as media."""
    output: Path | None = None
    """Output folder, whose sample pictures are not listed as media."""
    elsewhere: Elsewhere = ()
    """Parts of this folder whose files other inputs pack."""
    is_counted: bool = False
    """Whether another input counts the ignored files of this folder."""

    @property
    def name(self) -> str:
        return self.root.resolve().name

    @property
    def beside(self) -> list[ControlFolder | MaskFolder | RejectedFolder]:
        """The folders of controls, masks and rejected samples of these media."""
        return [*self.controls, *(one for one in (self.masks, self.rejected) if one is not None)]

    def next_to(self, other: FolderCollection, *, is_later: bool) -> FolderCollection:
        """A copy of this folder that takes account of another input, `other`, if the two overlap.

        In the copy, media that `other` packs are not counted as ignored, and only one of the two
        inputs counts the ignored files of both. `is_later` is true if this folder comes after
        `other` in the list of inputs. If the two do not overlap, this folder itself is returned.
        """
        mine, its = self.root.resolve(), other.root.resolve()
        is_inside = _is_visible(mine, below=its)
        if not is_inside and not _is_visible(its, below=mine):
            return self
        folder = "" if is_inside else f"{its.relative_to(mine).as_posix()}/"
        return replace(
            self,
            elsewhere=(*self.elsewhere, (folder, other.kinds)),
            is_counted=self.is_counted or (is_inside and (is_later or mine != its)),
        )

    def media(self, ignored: Ignored) -> Iterator[Medium]:
        without = [folder.root for folder in self.beside]
        without += [] if self.output is None else [self.output]
        listing = list_media(
            self.root, self.kinds, option=self.option, without=without, elsewhere=self.elsewhere
        )
        members, refused = self._unpacked(listing)
        sources = sorted({*listing.media, *(path for path in refused if self._stands_alone(path))})
        if not sources:
            raise PrepError(
                f"{self.option} {self.root}: its archives hold no media; give another folder"
            )
        counted = Ignored() if self.is_counted else ignored
        captions = self._captions(listing, members, refused, counted)
        if named := captions.tables.only_beside().intersection(sources):
            what = "control or rejected picture that a table names, no sample itself"
            ignored.counts[what] += len(named)
            sources = [source for source in sources if source not in named]
        counted.counts.update(listing.ignored)
        counted.counts.update(captions.tables.unused(self._exists(listing, members)))
        masks = {} if self.masks is None else _beside(self.masks, sources, ignored)
        controls = [_beside(folder, sources, ignored) for folder in self.controls]
        rejected = {} if self.rejected is None else _beside(self.rejected, sources, ignored)
        for source in sources:
            where, name = members.get(source, source), name_of(source)
            yield Medium(
                source=source,
                where=where,
                stamp=self._stamp(where),
                kind=media_kind_of(source) or "archive",
                captions=lambda source=source: _unless(refused, source, captions.all_of),
                mask=masks.get(name),
                controls=tuple(found.get(name) for found in controls),
                rejected=rejected.get(name),
            )

    def _unpacked(self, listing: Listing) -> tuple[dict[str, str], dict[str, RefusedError]]:
        """Lists the members of the archives in `listing` and adds them to `listing`.

        Returns (members, refused): the location of each member by path, and an error for each
        archive or member that cannot be read.
        """
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
                listing.add(path, self.kinds, self.elsewhere)
            for path, why in contents.refused.items():
                refused[path] = RefusedError(Reason.UNREADABLE, why)
        for archive in listing.archives[len(outer) :]:
            why = "an archive in an archive is not read; unpack the outer one"
            refused[archive] = RefusedError(Reason.UNREADABLE, why)
        return members, refused

    def open(self, where: str) -> Path | BinaryIO:
        place = parse_location(where)
        if place is None:
            return self.root / where
        archive, start, size = place
        if not size:
            raise RefusedError(Reason.EMPTY, "it has 0 bytes; copy or download it again")
        return io.BytesIO(self._bytes(archive, start, size))

    def _text(self, where: str) -> bytes:
        place = parse_location(where)
        return self._bytes(*place) if place else read_regular_file(self.root / where)

    def _stands_alone(self, path: str) -> bool:
        """Whether the unreadable file `path` is a sample to refuse: a medium or an archive."""
        return media_kind_of(path) in self.kinds or path.lower().endswith(".tar")

    def _bytes(self, archive: str, start: int, size: int) -> bytes:
        try:
            with (self.root / archive).open("rb") as stream:
                # Checked before `size` bytes are allocated: the archive may have changed.
                if os.fstat(stream.fileno()).st_size < start + size:
                    raise RefusedError(
                        Reason.UNREADABLE, f"{archive} is cut short; copy or download it again"
                    )
                stream.seek(start)
                return stream.read(size)
        except OSError as error:
            raise RefusedError(Reason.UNREADABLE, f"{archive}: {reason(error)}") from error

    def _stamp(self, where: str) -> str:
        place = parse_location(where)
        try:
            return stamp_of(self.root / (place[0] if place else where))
        except OSError:
            return ""  # reading the file will report why

    def _exists(self, listing: Listing, members: Mapping[str, str]) -> Callable[[str], bool]:
        root = str(self.root)
        others = {composed(path) for path in listing.others if not path.isascii()}
        return lambda path: (
            path in members or composed(path) in others or os.path.lexists(os.path.join(root, path))
        )

    def _captions(
        self,
        listing: Listing,
        members: dict[str, str],
        refused: dict[str, RefusedError],
        ignored: Ignored,
    ) -> Captions:
        def read(path: str) -> bytes:
            return _unless(refused, path, lambda path: self._text(members.get(path, path)))

        def control(path: str) -> ControlPicture:
            where = members.get(path, path)
            return ControlPicture(path, where, self._stamp(where))

        only, media, field = self.captions.format, listing.media, self.captions.field
        tables = tuple(
            path
            for path in listing.tables
            if only is CaptionFormat.AUTO or table_format(path) == only.value
        )
        unread = f"caption table that --caption_format {only} leaves out"
        ignored.add_first(unread, set(listing.tables).difference(tables))
        return Captions(
            root=self.root,
            sidecars=_sidecars(listing, self.captions, ignored),
            field=field,
            missing=self.captions.missing,
            tables=CaptionTables(
                paths=tables,
                media=media,
                caption_field=field,
                read=read,
                missing=self.captions.missing,
                root=self.root,
                control=control,
            ),
            read=read,
        )


def _is_visible(folder: Path, *, below: Path) -> bool:
    if not folder.is_relative_to(below):
        return False
    parts = folder.relative_to(below).parts
    return not any(part.startswith(".") or part in OF_SYSTEMS for part in parts)


def _sidecars(listing: Listing, options: CaptionOptions, ignored: Ignored) -> Mapping[str, str]:
    """The caption files that have an effect, in the form of `Captions.sidecars`.

    The others are counted in `ignored`.
    """
    found, left = dict[str, str](), listing.sidecars
    if options.format not in (CaptionFormat.AUTO, CaptionFormat.SIDECAR):
        why = f"--caption_format {options.format}"
    else:
        why, endings = "--caption_field ''", SIDECAR_ENDINGS if options.field else (".txt",)
        found = {key: path for key, path in left.items() if key.endswith(endings)}
        left = {key: path for key, path in left.items() if key not in found}
    ignored.add_first(f"caption file that {why} leaves out", left.values())
    matched = match(
        found,
        lambda: (
            (path + ending, name_of(path) + ending)
            for path in listing.media
            for ending in SIDECAR_ENDINGS
        ),
    )
    spare = set(matched.spare)
    if spare:  # files that are ignored may have captions, too
        others = {composed(name) for path in listing.others for name in (path, name_of(path))}
        spare = {path for path in spare if composed(name_of(path)) not in others}
    lines = {path for path in spare if PurePosixPath(path).name.lower() in _LINES}
    ignored.add_first(_LINES_REMEDY, lines)
    ignored.add_first("caption file that no medium takes", spare - lines)
    ignored.add_first(f"caption file {UNCLEAR}", matched.unclear)
    return matched.by_name


def _unless(refused: Mapping[str, RefusedError], path: str, act: Callable[[str], T]) -> T:
    if path in refused:
        raise refused[path]
    return act(path)


def path_of(collection: Collection, where: str) -> Path | None:
    """The path of the file at `where`; None for a member of an archive or a row of a dataset."""
    if not isinstance(collection, FolderCollection) or not where or parse_location(where):
        return None
    return collection.root / where


def is_itself(collection: Collection, medium: Medium, where: str, folder: Path | None) -> bool:
    """Whether `where` in `folder` is the file of `medium` itself, perhaps through links.

    `folder` is None for the folder of the media.
    """
    if folder is None and where == medium.where:
        return True
    own = path_of(collection, medium.where)
    other = path_of(collection, where) if folder is None else folder / where
    try:
        return own is not None and other is not None and own.samefile(other)
    except OSError:  # reading it says why
        return False
