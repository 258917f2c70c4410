"""The two values a source deals in: what it listed, and what it read."""

# C colour channels, F frames, H rows, W columns

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One medium that a source has listed and not yet opened."""

    key: str  # of the sample in the shards: unique, no dots
    source: str  # path relative to the input root


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
    """Where clips come from."""

    @property
    def name(self) -> str:
        """Goes into the dataset card."""
        ...

    @property
    def entries(self) -> Sequence[Entry]: ...

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
