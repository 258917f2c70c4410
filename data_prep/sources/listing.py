"""Lists the files below a folder: media, caption files, tables, archives, and ignored ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from data_prep.media.captions import SIDECAR_ENDINGS
from data_prep.media.images import image_endings
from data_prep.refusals import PrepError, printable
from data_prep.sources.caption_tables import is_table
from dit.codecs.frame_pictures import ENDINGS as VIDEO_ENDINGS

Elsewhere = Sequence[tuple[str, frozenset[str]]]
"""(subfolder, kinds of media) for each part of an input that other inputs pack. The subfolder ends
with "/", or is "" for the whole input."""
IMAGES, VIDEOS, BOTH = frozenset(("image",)), frozenset(("video",)), frozenset(("image", "video"))
_REMEDIES = {
    "convert them to JPEG or PNG": (
        ".heic .heif .dng .cr2 .cr3 .nef .arw .raf .rw2"  # of cameras
    ),
    "animations are not read as clips; convert them to MP4": ".gif .webp .apng",
    "captions are read from .txt and .json; rename them": (
        ".caption .captions .cap .tags .tag .text .prompt"
    ),
    "tables of captions are read from .csv, .tsv and .jsonl": (
        ".parquet .xls .xlsx .ods .ndjson .tab"
    ),
    "sound without pictures makes no sample; sound is read from videos": (
        ".wav .mp3 .flac .m4a .aac .ogg .oga .opus .wma .aif .aiff .ac3 .mka .amr"
    ),
    "unpack them, or pack them as .tar": ".zip .7z .rar .tgz .gz .bz2 .xz .zst",
}
OF_SYSTEMS = frozenset(("@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "__MACOSX"))
"""Names of folders for thumbnails, deleted files and attributes that servers and systems add."""
_REMEDY = {ending: why for why, endings in _REMEDIES.items() for ending in endings.split()}
"""File ending -> advice about ignored files that have it."""


@dataclass(kw_only=True, slots=True)
class Ignored:
    """Counts of files that become no sample, by the reason or kind, for the user."""

    counts: Counter[str] = field(default_factory=Counter)
    _unused: dict[tuple[str, Path], set[str]] = field(default_factory=dict)

    def add_first(self, what: str, files: Collection[str]) -> None:
        """Counts `files` as `what`; the text of the count also names the first of them."""
        if files:
            self.counts[f"{what}, the first {printable(min(files))}"] += len(files)

    def add_unused(self, what: str, folder: Path, files: Collection[str]) -> None:
        """Remembers that an input does not use `files` in `folder`; `close` counts them as `what`.

        If several inputs share the folder, only files that none of them uses are counted.
        """
        key = what, folder
        self._unused[key] = self._unused.get(key, set(files)).intersection(files)

    def close(self) -> None:
        """Counts the files that no input has used."""
        for (what, _), files in self._unused.items():
            self.add_first(what, files)
        self._unused.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of a folder by kind, as relative paths."""

    media: list[str] = field(default_factory=list)
    archives: list[str] = field(default_factory=list)
    sidecars: dict[str, str] = field(default_factory=dict)
    """Caption files: path with its ending in lower case -> actual path."""
    tables: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Visible files of other kinds."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Counts of ignored files, by kind."""

    def add(self, path: str, kinds: frozenset[str], elsewhere: Elsewhere = ()) -> None:
        """Adds the file `path` to the list of its kind, which its ending decides.

        It is a medium only if it is of `kinds`. A medium of another kind is counted as ignored,
        unless another input packs it (`elsewhere`).
        """
        ending, kind = PurePosixPath(path).suffix.lower(), media_kind_of(path)
        if kind in kinds:
            self.media.append(path)
        elif is_table(path):
            self.tables.append(path)
        elif ending in SIDECAR_ENDINGS:
            stem = path[: len(path) - len(ending)]
            if self.sidecars.setdefault(stem + ending, path) != path:
                self.ignored[f"*{ending} that differs from another in the ending's case"] += 1
        elif ending == ".tar":
            self.archives.append(path)
        else:
            self.others.append(path)
            if any(kind in taken and path.startswith(folder) for folder, taken in elsewhere):
                return
            remedy = f" ({_REMEDY[ending]})" if ending in _REMEDY else ""
            self.ignored[f"*{printable(ending)}{remedy}" if ending else "no ending"] += 1


def media_kind_of(path: str) -> str | None:
    """`image` or `video` by the ending of `path`, in upper or lower case; else None."""
    ending = PurePosixPath(path).suffix.lower()
    if ending in VIDEO_ENDINGS:
        return "video"
    return "image" if ending in image_endings() else None


def stamp_of(path: Path) -> str:
    """Size in bytes and modification time of `path` as a string, which shows if the file changes.

    Raises:
        OSError: the file does not exist.
    """
    status = path.stat()
    return f"{status.st_size}-{status.st_mtime_ns}"


def name_of(path: str) -> str:
    """`path` without its ending, by which a medium and the files that belong to it are matched."""
    return str(PurePosixPath(path).with_suffix(""))


def list_media(
    root: Path,
    kinds: frozenset[str] = IMAGES,
    *,
    option: str = "--image_dir",
    without: Collection[Path] = (),
    elsewhere: Elsewhere = (),
) -> Listing:
    """Lists the files below `root`, at any depth, in a fixed order.

    Media are files of `kinds`; the folders `without` are left out. `option` names `root` in
    messages.

    Raises:
        PrepError: `root` is not a folder, holds neither media nor archives, or cannot be read.
    """
    if not root.is_dir():
        raise PrepError(f"{option} {root} is not a folder; correct the path")
    listing = Listing()
    for path in _walk(root, listing.ignored, {folder.resolve() for folder in without}):
        listing.add(str(path), kinds, elsewhere)
    if not listing.media and not listing.archives:
        found = ", ".join(f"{count} x {kind}" for kind, count in listing.ignored.items())
        known = {ending for ending in image_endings() if "image" in kinds}
        known |= {ending for ending in VIDEO_ENDINGS if "video" in kinds}
        raise PrepError(
            f"{option} {root} holds no {' or '.join(sorted(kinds))} (it holds"
            f" {found or 'nothing else either'}); give another folder, or rename files to one of"
            f" the known endings: {' '.join(sorted(known))}"
        )
    for names in (listing.media, listing.archives, listing.tables):
        names.sort()
    return listing


def _walk(root: Path, ignored: Counter[str], without: set[Path]) -> Iterator[PurePosixPath]:
    """Yields the relative paths of all visible files below `root`, except in the folders `without`.

    Hidden files, linked folders and folders that servers or systems add are counted in `ignored`.
    """

    def stop(error: OSError) -> None:
        raise PrepError(
            f"{error.filename} cannot be listed: {error.strerror}; make it readable, or move it"
        )

    for folder, folders, files in os.walk(root, onerror=stop):
        linked = {name for name in folders if os.path.islink(os.path.join(folder, name))}
        hidden = {name for name in (*folders, *files) if name.startswith(".")}
        ignored.update(["linked folder"] * len(linked - hidden) + ["hidden"] * len(hidden))
        added = OF_SYSTEMS.intersection(folders) - linked
        ignored.update(f"folder {name}, which a file server or system adds" for name in added)
        outside = {name for name in folders if without and Path(folder, name).resolve() in without}
        folders[:] = sorted(set(folders) - hidden - linked - added - outside)
        relative = PurePosixPath(Path(folder).relative_to(root).as_posix())
        yield from (relative / name for name in sorted(set(files) - hidden))
