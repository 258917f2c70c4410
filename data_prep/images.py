"""A folder of images as a source of clips."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from data_prep.captions import SIDECAR_ENDINGS, Captions, MissingCaption
from data_prep.clips import Clip, Entry
from data_prep.pictures import Fit, image_endings, open_image, to_rgb, to_video
from data_prep.refusals import PrepError
from data_prep.splits import key_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What a folder holds, by path relative to it."""

    images: list[str] = field(default_factory=list)
    sidecars: dict[str, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)


def list_images(root: Path) -> Listing:
    """All images and caption files below `root`, however deep, in an order that is always the same.

    Raises:
        PrepError: `root` is no folder, a folder in it cannot be read, or it holds no image.
    """
    if not root.is_dir():
        raise PrepError(f"--image_dir {root} is no folder")
    endings, listing = image_endings(), Listing()
    for path in _walk(root, listing.ignored):
        ending = path.suffix.lower()
        if ending in endings:
            listing.images.append(str(path))
        elif ending in SIDECAR_ENDINGS:
            listing.sidecars.setdefault(str(path.with_suffix(ending)), str(path))
        else:
            listing.ignored[f"*{ending}" if ending else "no ending"] += 1
    if not listing.images:
        found = ", ".join(f"{count} x {kind}" for kind, count in listing.ignored.items())
        raise PrepError(
            f"--image_dir {root} holds no image (it holds {found or 'nothing else either'});"
            f" endings that are known: {' '.join(sorted(endings))}"
        )
    listing.images.sort()
    return listing


def _walk(root: Path, ignored: Counter[str]) -> Iterator[PurePosixPath]:
    """Relative paths of all visible files; hidden ones and linked folders are only counted."""

    def stop(error: OSError) -> None:
        raise PrepError(f"{error.filename} cannot be listed: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=stop):
        linked = {name for name in folders if os.path.islink(os.path.join(folder, name))}
        hidden = {name for name in (*folders, *files) if name.startswith(".")}
        ignored.update(["linked folder"] * len(linked - hidden) + ["hidden"] * len(hidden))
        folders[:] = sorted(set(folders) - hidden - linked)
        relative = PurePosixPath(Path(folder).relative_to(root).as_posix())
        yield from (relative / name for name in sorted(set(files) - hidden))


class ImageFolder:
    """Every image below a folder, with its caption."""

    def __init__(
        self, root: Path, *, fit: Fit, colours: int, caption_field: str, missing: MissingCaption
    ):
        listing = list_images(root)
        self.name = root.resolve().name
        self.ignored = listing.ignored
        self.entries = tuple(Entry(key=key_of(path), source=path) for path in listing.images)
        self._root, self._fit, self._colours = root, fit, colours
        self._captions = Captions(
            root=root, sidecars=listing.sidecars, field=caption_field, missing=missing
        )

    def read(self, entry: Entry) -> Clip:
        """The picture as pixels, upright, in a size that patches fit into.

        Raises:
            RefusedError: the file or its caption cannot be used.
        """
        image, is_animated = open_image(self._root / entry.source)
        fitted = self._fit.apply(to_rgb(image))
        caption = self._captions.of(entry.source)
        notes = [f"caption from {caption.origin}"]
        if fitted.size != image.size:
            notes.append("scaled or cropped")
        if is_animated:
            notes.append("only the first frame of an animation")
        return Clip(
            video_CFHW=to_video(fitted, colours=self._colours),
            caption=caption.text,
            original_height=image.height,
            original_width=image.width,
            notes=tuple(notes),
        )
