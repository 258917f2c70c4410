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
from data_prep.truncation import missing_bytes

ENDINGS = frozenset((".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts"))
_UNEVEN = 0.1  # frames whose distances differ by more than this part are of a variable rate
_SLACK = 0.1  # seconds by which headers are wrong


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
        if missing := missing_bytes(stream):
            raise RefusedError(Reason.VIDEO_DAMAGED, f"at least {missing} bytes are missing")
        try:
            container = av.open(stream, "r")
        except (FFmpegError, OSError) as error:
            raise RefusedError(Reason.NO_VIDEO, str(error)) from error
        with container:
            if not container.streams.video:
                raise RefusedError(Reason.NO_VIDEO, "it holds no video stream")
            video = container.streams.video[0]
            video.thread_type = "AUTO"
            video.codec_context.options = {"err_detect": "explode"}  # else damage is painted over
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
        width, height = _upright_size(container, video)
        tick = Fraction(video.time_base)
        packets, end_of_others = _packets(container, video)
        if not packets:
            raise RefusedError(Reason.VIDEO_DAMAGED, "it holds no frame")
        shown = sorted({at for at, _ in packets})
        gap = (shown[-1] - shown[0]) // max(1, len(shown) - 1)
        last = max(long for at, long in packets if at == shown[-1])
        end = shown[-1] + (last or gap or round(1 / (25 * tick)))
        _check_end(container, video, len(shown), end=max(end_of_others, float(end * tick)))
        return Timeline(
            width=width,
            height=height,
            shown=tuple(shown),
            tick=tick,
            duration=float((end - shown[0]) * tick),
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


def _packets(container: Any, video: Any) -> tuple[list[tuple[int, int]], float]:
    """Presentation time and duration of each frame, and when the other streams end, in seconds."""
    found, end = [], 0.0
    for packet in container.demux():
        at = packet.dts if packet.pts is None else packet.pts
        if not packet.size or at is None:
            continue
        if packet.stream is not video and packet.stream.index != video.index:
            end = max(end, float((at + (packet.duration or 0)) * packet.time_base))
            continue
        if packet.is_corrupt:
            raise RefusedError(Reason.VIDEO_DAMAGED, f"a packet after {len(found)} frames is cut")
        if not packet.is_discard:
            found.append((at, packet.duration or 0))
    return found, end


def _check_end(container: Any, video: Any, frames: int, *, end: float) -> None:
    """The file has as much as its header promises; `end` is that of its last stream.

    Raises:
        RefusedError: it has less; a shorter video would be packed as if it were whole.
    """
    promised = video.frames
    if promised and frames < promised - 1:  # AVI counts one more now and then
        raise RefusedError(Reason.VIDEO_DAMAGED, f"{frames} of {promised} frames are there")
    start, length = (container.start_time or 0) / 1e6, (container.duration or 0) / 1e6
    # Others say how many frames they have; Matroska says when the last one ends, to the frame.
    slack = 0.9 / float(video.average_rate or 25)
    slack += 0 if "matroska" in container.format.name else _SLACK
    if length and end < start + length - slack:
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
