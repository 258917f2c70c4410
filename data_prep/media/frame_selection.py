"""Selects the frames of samples by the presentation times of a video's frames."""

from __future__ import annotations

import bisect
import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from data_prep.refusals import PrepError, Reason, RefusedError

if TYPE_CHECKING:
    from data_prep.media.videos import Timeline

_RATES = (0.01, 1000)  # frames a second, least and most
_MOST_FRAMES = 1 << 20  # of a clip; 12 hours at 24 frames a second


class Window(StrEnum):
    """Part of a clip that becomes the sample if the clip is longer; ALL: each part becomes one."""

    FIRST = "first"
    MIDDLE = "middle"
    RANDOM = "random"
    ALL = "all"


class KeptFrames(NamedTuple):
    """Frames of a clip that become one sample, by presentation time."""

    shown: tuple[int, ...]  # presentation times, in units of the timeline's `tick`
    fps: float | None  # None for a single picture
    is_resampled: bool = False  # to a constant frame rate
    begin: float = 0.0  # seconds on the clock of the file at which the sample begins


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameRule:
    """Selects the frames of samples: how many, at which rate, and from which part of a clip."""

    stride: int = 1
    """Temporal stride of the codec: a sample has 1 + n * stride frames."""
    count: int | None = None
    """Most frames in a sample; None: as many as the clip has."""
    fps: float | None = None
    """Frame rate of samples in frames per second; None: the file's frame rate."""
    buckets: tuple[int, ...] = ()
    """Numbers of frames that are allowed; a clip gets the largest that it can fill."""
    window: Window = Window.FIRST
    drop_short: bool = False
    """Whether clips with fewer than `count` frames are refused, instead of being kept shorter."""
    stills: int = 0
    """Number of evenly spaced frames of a clip that become samples of one frame each; 0: none, a
    clip becomes a sample."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise PrepError(f"--target_frames {self.count} must be at least 1 frame")
        for count in (self.count, *self.buckets):
            if count is not None and (count - 1) % self.stride:
                low = count - (count - 1) % self.stride
                raise PrepError(
                    f"{count} frames do not fit this processor, which takes {self.stride}n + 1;"
                    f" give {low} or {low + self.stride} (--target_frames, --frame_buckets)"
                )
        if self.fps is not None and not _RATES[0] <= self.fps <= _RATES[1]:
            raise PrepError(
                f"--train_fps {self.fps} must lie in {_RATES[0]} to {_RATES[1]} frames a second"
            )
        if self.buckets and min(self.buckets) < 1:
            least = min(self.buckets)
            raise PrepError(f"--frame_buckets: {least} frames are too few; each needs at least 1")

    def choose(self, line: Timeline, *, seed: str) -> list[KeptFrames]:
        """Selects the frames of each sample that the video with the timeline `line` becomes.

        `seed` decides where a random window begins.

        Raises:
            RefusedError: the clip has too few frames.
        """
        if self.stills:
            shown = line.shown
            count = min(self.stills, len(shown))
            picks = [shown[(2 * k + 1) * len(shown) // (2 * count)] for k in range(count)]
            return [KeptFrames((at,), None) for at in picks]
        shown = line.shown if self.fps is None else self._at_rate(line, self.fps)
        length = self._length(len(shown), line.change and f" until it changes {line.change}")
        return [
            self._window(line, shown, start, start + length)
            for start in self._starts(len(shown), length, seed)
        ]

    def _window(self, line: Timeline, shown: tuple[int, ...], start: int, stop: int) -> KeptFrames:
        """The sample of the frames `start` to `stop` - 1 of `shown`, with its frame rate.

        `shown` are presentation times in units of `line.tick`. The frame rate is `fps` of this rule
        if given, else that of the file (of these frames, if it varies).
        """
        kept, tick = shown[start:stop], float(line.tick)
        if self.fps is not None:
            # The frame that is shown then may have begun earlier.
            begin = line.shown[0] * tick + start / self.fps
            return KeptFrames(kept, self.fps, is_resampled=True, begin=begin)
        fps = line.fps_of(start, stop) if line.is_uneven else line.fps
        return KeptFrames(kept, fps, begin=kept[0] * tick)

    def _at_rate(self, line: Timeline, fps: float) -> tuple[int, ...]:
        """Presentation times of the frames that a clip at the constant rate `fps` consists of.

        Each of them is the video's frame that is visible at that moment. If the video has a lower
        rate, its frames are repeated, so its speed is unchanged.

        Raises:
            RefusedError: the clip would have too many frames.
        """
        count = max(1, math.floor(min(line.duration * fps, _MOST_FRAMES + 1) + 1e-6))
        if count > _MOST_FRAMES:
            raise RefusedError(
                Reason.VIDEO_DAMAGED,
                f"{line.duration:.0f} s at --train_fps {fps:g} are more than the {_MOST_FRAMES}"
                " frames that a video may have; cut the video, or lower --train_fps",
            )
        begin, tick = line.shown[0] + line.rounding, float(line.tick)
        times = [begin + (k / fps + 1e-9) / tick for k in range(count)]
        return tuple(line.shown[bisect.bisect_right(line.shown, t) - 1] for t in times)

    def _length(self, available: int, until: str) -> int:
        if self.buckets:
            fitting = [count for count in self.buckets if count <= available]
            if not fitting:
                raise RefusedError(
                    Reason.TOO_SHORT,
                    f"it has {available} frames{until}, fewer than {min(self.buckets)}, the least"
                    " of --frame_buckets; add a smaller one",
                )
            return max(fitting)
        if self.drop_short and self.count is not None and available < self.count:
            why = f"it has {available} frames{until}, fewer than --target_frames {self.count}"
            raise RefusedError(
                Reason.TOO_SHORT, f"{why}; leave --drop_short out to pack what there is"
            )
        most = min(available, self.count or available)
        return most - (most - 1) % self.stride

    def _starts(self, available: int, length: int, seed: str) -> list[int]:
        spare = available - length
        if self.window is Window.ALL:
            return list(range(0, spare + 1, length))
        if self.window is Window.RANDOM:
            digest = hashlib.blake2b(seed.encode(), digest_size=8, person=b"window").digest()
            return [int.from_bytes(digest, "little") % (spare + 1)]
        return [spare // 2 if self.window is Window.MIDDLE else 0]
