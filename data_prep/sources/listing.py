"""The files below a folder: media, caption files, tables, archives, and ignored ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from data_prep.media.captions import SIDECAR_ENDINGS
from data_prep.media.images import image_endings
from data_prep.media.videos import ENDINGS as VIDEO_ENDINGS
from data_prep.refusals import PrepError, printable
from data_prep.sources.caption_tables import is_table

IMAGES, VIDEOS, BOTH = frozenset(("image",)), frozenset(("video",)), frozenset(("image", "video"))
_OF_CAMERAS = frozenset((".heic", ".heif", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".rw2"))
"""Photographs that Pillow does not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of a folder, by relative path."""

    media: list[str] = field(default_factory=list)
    archives: list[str] = field(default_factory=list)
    sidecars: dict[str, str] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)

    def add(self, path: str, kinds: frozenset[str]) -> None:
        """Adds a file, by its ending."""
        ending = PurePosixPath(path).suffix.lower()
        if media_kind_of(path) in kinds:
            self.media.append(path)
        elif is_table(path):
            self.tables.append(path)
        elif ending in SIDECAR_ENDINGS:
            stem = path[: len(path) - len(ending)]
            self.sidecars.setdefault(stem + ending, path)
        elif ending == ".tar":
            self.archives.append(path)
        else:
            remedy = " (convert them to JPEG or PNG)" if ending in _OF_CAMERAS else ""
            self.ignored[f"*{printable(ending)}{remedy}" if ending else "no ending"] += 1


def media_kind_of(path: str) -> str | None:
    """`image` or `video`, by the ending in upper or lower case; None for other files."""
    ending = PurePosixPath(path).suffix.lower()
    if ending in VIDEO_ENDINGS:
        return "video"
    return "image" if ending in image_endings() else None


def list_media(
    root: Path,
    kinds: frozenset[str] = IMAGES,
    *,
    option: str = "--image_dir",
    without: Collection[Path] = (),
) -> Listing:
    """Media and caption files below `root`, at any depth, always in the same order.

    `without` are folders that are left out.

    Raises:
        PrepError: `root` is no folder, a folder in it cannot be read, or it holds no medium.
    """
    if not root.is_dir():
        raise PrepError(f"{option} {root} is no folder")
    listing = Listing()
    for path in _walk(root, listing.ignored, {folder.resolve() for folder in without}):
        listing.add(str(path), kinds)
    if not listing.media and not listing.archives:
        found = ", ".join(f"{count} x {kind}" for kind, count in listing.ignored.items())
        known = {ending for ending in image_endings() if "image" in kinds}
        known |= {ending for ending in VIDEO_ENDINGS if "video" in kinds}
        raise PrepError(
            f"{option} {root} holds no {' or '.join(sorted(kinds))} (it holds"
            f" {found or 'nothing else either'}); endings that are known: {' '.join(sorted(known))}"
        )
    for names in (listing.media, listing.archives, listing.tables):
        names.sort()
    return listing


def _walk(root: Path, ignored: Counter[str], without: set[Path]) -> Iterator[PurePosixPath]:
    """Relative paths of all visible files; hidden files and linked folders are only counted."""

    def stop(error: OSError) -> None:
        raise PrepError(f"{error.filename} cannot be listed: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=stop):
        linked = {name for name in folders if os.path.islink(os.path.join(folder, name))}
        hidden = {name for name in (*folders, *files) if name.startswith(".")}
        ignored.update(["linked folder"] * len(linked - hidden) + ["hidden"] * len(hidden))
        outside = {name for name in folders if without and Path(folder, name).resolve() in without}
        folders[:] = sorted(set(folders) - hidden - linked - outside)
        relative = PurePosixPath(Path(folder).relative_to(root).as_posix())
        yield from (relative / name for name in sorted(set(files) - hidden))
