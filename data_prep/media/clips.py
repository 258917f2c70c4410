"""The values that sources deal in: a sample that is planned, and what was read for it."""

# C colour channels, F frames, H rows, W columns

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One sample as planned, before anything is decoded: what it will be, or why it is refused.

    A line of `plan.jsonl`. A file makes one sample, or several: windows, captions, resolutions.
    """

    key: str  # of the sample in the shards: unique, no dots
    source: str  # path relative to the input root
    file_key: str = ""  # decides order and split, so that samples of a file stay together
    folder: int = 0  # number of the input folder whose settings hold
    where: str = ""  # how that folder's store opens the file
    stamp: str = ""  # changes when the file changes
    kind: str = "image"
    width: int = 0  # pixels, upright and square
    height: int = 0
    frames: int = 1  # in the file
    fps: float | None = None  # of the file; None for a picture
    duration: float | None = None  # seconds
    caption: str = ""
    caption_from: str = ""
    resized: tuple[int, int] | None = None  # width, height before the crop
    size: tuple[int, int] | None = None  # width, height that is encoded
    keep: tuple[int, ...] = ()  # presentation times of the frames kept, in units of `tick`
    tick: str = ""  # seconds, a fraction
    numbers: tuple[int, ...] = ()  # of the frames kept, where the decoder gives no times
    kept_fps: float | None = None  # of the frames kept
    tokens: int = 0
    repeats: int = 1  # how often the shards hold it
    notes: tuple[str, ...] = ()
    refused: str = ""  # reason
    detail: str = ""

    @property
    def group(self) -> str:
        return self.file_key or self.key

    def to_line(self) -> str:
        """One line of JSON without what has its default value."""
        given = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return json.dumps(given, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        given = json.loads(line)
        for name in ("resized", "size", "keep", "numbers", "notes"):
            if name in given:
                given[name] = tuple(given[name])
        return cls(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """One picture or video as a processor takes it, with its caption."""

    video_CFHW: Tensor  # float32 in [-1, 1]; a picture has one frame
    caption: str
    original_height: int  # pixels, upright, before scaling and cropping
    original_width: int
    fps: float | None = None  # frames per second; None for a picture
    notes: tuple[str, ...] = ()  # what the summary should count, such as where the caption is from


class Source(Protocol):
    """Where clips come from. Pickled and sent to worker processes, which call `read` alone."""

    @property
    def name(self) -> str:
        """Goes into the dataset card."""
        ...

    @property
    def entries(self) -> Iterable[Entry]:
        """Every sample, planned; refused ones as well. Found anew each time."""
        ...

    @property
    def ignored(self) -> Mapping[str, int]:
        """What lay beside the media and was not looked at, counted by kind."""
        ...

    def read(self, entry: Entry) -> Clip:
        """The clip of `entry`.

        Raises:
            RefusedError: it cannot be packed.
        """
        ...


def settings_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON values, for cards and comparisons."""
    return {f.name: getattr(value, f.name) for f in fields(value)}
