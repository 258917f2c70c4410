"""Notes on samples that are packed although something about them is unusual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_prep.media.frame_selection import KeptFrames
from data_prep.media.videos import Timeline
from data_prep.sources.beside_media import (
    FOLDER,
    FoundReference,
)
from data_prep.sources.folders import Collection, Medium, is_itself

_MEAN_RATE = (
    "variable frame rate: frames as they are, fps is their mean rate (--train_fps keeps the pace)"
)
_REPEATED = "fewer frames a second than --train_fps: each is repeated to keep the pace"
_EVEN_CLOCK = (
    "variable frame rate: frames at the even times of --train_fps, some repeated or left out"
)
SAME_CONTROL = "control picture that is the sample itself: it shows what is to be made"
_SAME_MASK = "loss mask that is the sample itself: white counts, black does not"


def notes_of_frames(line: Timeline | None, window: KeptFrames) -> Iterator[str]:
    """Yields notes on a video's colours, missing frames and uneven rate; none for a picture."""
    if line is None:
        return
    yield from line.flaws
    if line.lost:
        yield "first frames left out, which need frames before the file begins"
    if line.is_uneven and window.fps is not None:
        yield _EVEN_CLOCK if window.is_resampled else _MEAN_RATE
    elif window.is_resampled and line.fps < 0.9 * (window.fps or 0):
        yield _REPEATED


def flaws_beside(found: Sequence[FoundReference]) -> list[str]:
    flaws = dict.fromkeys(flaw for one in found for flaw in one.flaws)
    return [f"control or rejected: {flaw}" for flaw in flaws]


def notes_of_mask(collection: Collection, medium: Medium) -> Iterator[str]:
    """Yields a note that says whether `medium` has a loss mask, if the input has a folder of masks.

    If the mask is the file of the medium itself, a second note says so.
    """
    if collection.masks is None:
        return
    yield "no loss mask of its name" if medium.mask is None else "loss mask"
    if medium.mask is not None and is_itself(
        collection, medium, medium.mask, collection.masks.root
    ):
        yield _SAME_MASK


def notes_of_controls(
    collection: Collection, medium: Medium, shown: Sequence[FoundReference]
) -> Iterator[str]:
    """Yields notes on the controls `shown`: their number, and whether one is the medium itself."""
    videos = sum(one.line is not None for one in shown)
    counts = {"pictures": len(shown) - videos, "videos": videos}
    yield from (f"{count} control {what}" for what, count in counts.items() if count)
    for one in shown:
        root = None if one.folder == FOLDER else collection.controls[one.folder].root
        if is_itself(collection, medium, one.picture.where, root):
            yield SAME_CONTROL
