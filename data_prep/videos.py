"""One video file -> when its frames are shown, and those frames upright in RGB.

PyAV brings its own FFmpeg. Only the frames that are kept are converted, and reading starts at the
key frame before the first of them and stops after the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from data_prep.pictures import opened
from data_prep.refusals import Reason, RefusedError

ENDINGS = frozenset((".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts"))
_UNEVEN = 0.1  # frames whose distances differ by more than this part are of a variable rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What is known of a video before its frames are decoded."""

    width: int  # pixels, upright and square
    height: int
    shown: tuple[int, ...]  # presentation time of each frame, rising, in units of `tick`
    tick: Fraction  # seconds
    duration: float  # seconds, the last frame included

    @property
    def fps(self) -> float:
        """Mean rate."""
        return len(self.shown) / self.duration

    @property
    def is_uneven(self) -> bool:
        """Whether the frames are shown for different times."""
        gaps = [later - earlier for earlier, later in pairwise(self.shown)]
        # A tick coarser than the rate (1 ms in Matroska) makes equal distances differ by one.
        return bool(gaps) and max(gaps) - min(gaps) > max(1, _UNEVEN * max(gaps))


@contextmanager
def _container(file: Path | BinaryIO) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream."""
    import av
    from av.error import FFmpegError

    with opened(file) as stream:
        try:
            container = av.open(stream, "r")
        except (FFmpegError, OSError) as error:
            raise RefusedError(Reason.NO_VIDEO, str(error)) from error
        with container:
            if not container.streams.video:
                raise RefusedError(Reason.NO_VIDEO, "it holds no video stream")
            video = container.streams.video[0]
            video.thread_type = "AUTO"
            try:
                yield container, video
            except (FFmpegError, OSError, ValueError) as error:
                raise RefusedError(
                    Reason.VIDEO_DAMAGED, f"{type(error).__name__}: {error}"
                ) from error


def timeline(file: Path | BinaryIO) -> Timeline:
    """When each frame is shown, from the packets; only the first frame is decoded.

    Raises:
        RefusedError: it is no video, holds no frame, or ends before it should.
    """
    with _container(file) as (container, video):
        size = _upright_size(container, video)
        packets = _packets(container, video)
        if not packets:
            raise RefusedError(Reason.VIDEO_DAMAGED, "it holds no frame")
        shown = sorted({at for at, _ in packets})
        tick = Fraction(video.time_base)
        last = max(long for at, long in packets if at == shown[-1])
        if not last:
            last = (shown[-1] - shown[0]) // max(1, len(shown) - 1) or round(1 / (25 * tick))
        _check_end(container, video, len(shown), end=float((shown[-1] + last) * tick))
        duration = float((shown[-1] + last - shown[0]) * tick)
        return Timeline(
            width=size[0], height=size[1], shown=tuple(shown), tick=tick, duration=duration
        )


def _upright_size(container: Any, video: Any) -> tuple[int, int]:
    frame = next(container.decode(video), None)
    if frame is None:
        raise RefusedError(Reason.VIDEO_DAMAGED, "its first frame cannot be decoded")
    container.seek(0)
    wide, high = _square(frame, video.sample_aspect_ratio)
    return (high, wide) if frame.rotation % 180 else (wide, high)


def _square(frame: Any, aspect: Fraction | None) -> tuple[int, int]:
    """Size of a frame with square pixels, before it is turned upright."""
    return max(1, round(frame.width * (aspect or 1))), frame.height


def _packets(container: Any, video: Any) -> list[tuple[int, int]]:
    """Presentation time and duration of each frame, decoded or not."""
    found = []
    for packet in container.demux(video):
        if packet.is_corrupt:
            raise RefusedError(Reason.VIDEO_DAMAGED, f"a packet after {len(found)} frames is cut")
        at = packet.dts if packet.pts is None else packet.pts
        if packet.size and at is not None and not packet.is_discard:
            found.append((at, packet.duration or 0))
    return found


def _check_end(container: Any, video: Any, frames: int, *, end: float) -> None:
    """The file has as much as its header promises.

    Raises:
        RefusedError: it has less; a shorter video would be packed as if it were whole.
    """
    promised = video.frames
    if promised and frames < promised - 1:  # AVI counts one more now and then
        raise RefusedError(Reason.VIDEO_DAMAGED, f"{frames} of {promised} frames are there")
    start = (container.start_time or 0) / 1e6
    length = (container.duration or 0) / 1e6
    only_video = all(stream.type == "video" for stream in container.streams)
    if only_video and length and end < start + 0.9 * length - 1:
        raise RefusedError(
            Reason.VIDEO_DAMAGED, f"it ends at {end:.1f} s, its header says {start + length:.1f} s"
        )


def frames(file: Path | BinaryIO, keep: tuple[int, ...]) -> Iterator[Image.Image]:
    """The frames shown at the times `keep`, in that order (rising; some may repeat), upright RGB.

    Raises:
        RefusedError: one of them cannot be decoded.
    """
    with _container(file) as (container, video):
        wanted = list(keep)
        container.seek(wanted[0], stream=video)
        for frame in container.decode(video):
            if frame.pts is None or frame.pts < wanted[0]:
                continue
            if frame.pts > wanted[0]:
                break
            if frame.is_corrupt:
                raise RefusedError(Reason.VIDEO_DAMAGED, f"the frame at {frame.time} s is damaged")
            picture = _picture(frame, video.sample_aspect_ratio)
            while wanted and wanted[0] == frame.pts:
                wanted.pop(0)
                yield picture
            if not wanted:
                return
        at = float(wanted[0] * video.time_base)
        raise RefusedError(Reason.VIDEO_DAMAGED, f"the frame at {at:.3f} s is missing")


def _picture(frame: Any, aspect: Fraction | None) -> Image.Image:
    picture = frame.to_image()
    size = _square(frame, aspect)
    if size != picture.size:
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    # FFmpeg counts the degrees counter-clockwise that turn the picture upright.
    turned = {90: "ROTATE_90", 180: "ROTATE_180", 270: "ROTATE_270"}.get(frame.rotation % 360)
    return picture.transpose(Image.Transpose[turned]) if turned else picture
