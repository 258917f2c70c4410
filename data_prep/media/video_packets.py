"""Packets of a video: what they say before a frame is decoded, and where decoding can begin.

1. `open_video`  file -> container and its video stream, damage refused
2. `scan`        every packet once: times, key frames, ends
3. `from_start`, `near`  the packets that a decoder needs, in its order
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from data_prep.media.images import opened
from data_prep.media.truncation import missing_bytes
from data_prep.refusals import Reason, RefusedError

_INDEXED = ("mov", "matroska")  # formats whose seeking ends at a key frame, found in a table
_REORDERED = 64  # packets after which no frame is shown earlier: codecs look 16 frames ahead
_VP8_SHOWN = 0x10  # bit of the first byte of a frame (RFC 6386, 9.1)
LARGEST = 2 * (Image.MAX_IMAGE_PIXELS or 2**27)  # pixels, where Pillow takes pictures for bombs


class Spot(NamedTuple):
    """What a packet says about its frame."""

    at: int | None  # presentation time, in units of the stream
    decoded: int | None  # decoding time
    duration: int
    is_key: bool
    is_hidden: bool  # by an edit list, or because the codec never shows it
    is_corrupt: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """All packets of a video, in the order of decoding."""

    spots: tuple[Spot, ...]
    end_of_others: float  # seconds, when the last other stream ends
    format: str
    promised_end: float | None  # seconds, by the header; None where it does not say

    @property
    def times(self) -> list[int]:
        """When each frame is shown, rising."""
        found = {_time(spot) for spot in self.spots if not spot.is_hidden}
        return sorted(at for at in found if at is not None)

    @property
    def tells_all(self) -> bool:
        """Whether the packets say when the decoder will show which frame, to the end.

        MPEG streams have no table of their frames: only decoding shows that the last one is whole.
        AVI stores no presentation times; FFmpeg guesses them where frames change their order.
        """
        shown = [spot for spot in self.spots if not spot.is_hidden]
        if "mpeg" in self.format or not self.spots[0].is_key:
            return False
        if any(spot.at is None for spot in self.spots) or len(self.times) < len(shown):
            return False
        if "avi" in self.format and any(spot.at != spot.decoded for spot in self.spots):
            return False
        return self.times[:1] == [spot.at for spot in shown[:1]]  # none leads the first key frame


def _time(spot: Spot) -> int | None:
    return spot.decoded if spot.at is None else spot.at


@contextmanager
def open_video(file: Path | BinaryIO) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; what FFmpeg raises becomes a refusal."""
    import av
    from av.error import FFmpegError

    with opened(file) as stream:
        stream.seek(0)
        try:
            # Titles of any encoding: nobody reads them here.
            container = av.open(stream, "r", metadata_errors="replace")
        except (FFmpegError, OSError, ValueError) as error:
            raise RefusedError(Reason.NO_VIDEO, str(error)) from error
        with container:
            video = _first_film(container)
            video.thread_type = "NONE"  # threads lose the errors of the last frames
            # Else damage is painted over, and a few bytes ask for all memory.
            limits = {"err_detect": "explode", "max_pixels": str(LARGEST)}
            video.codec_context.options = limits
            try:
                yield container, video
            except (FFmpegError, OSError, ValueError, OverflowError, MemoryError) as error:
                detail = f"{type(error).__name__}: {error}"
                raise RefusedError(Reason.VIDEO_DAMAGED, detail) from error


def _first_film(container: Any) -> Any:
    from av.stream import Disposition

    films = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not films:
        raise RefusedError(Reason.NO_VIDEO, "it holds no video stream")
    if films[0].codec_context is None:
        raise RefusedError(Reason.NO_VIDEO, "its codec is unknown")
    if not films[0].time_base:
        raise RefusedError(Reason.VIDEO_DAMAGED, "its frames have no unit of time")
    return films[0]


def check_whole(file: Path | BinaryIO) -> bool:
    """Whether the outermost boxes of a file say that it is whole; False where they do not say.

    Raises:
        RefusedError: bytes are missing.
    """
    with opened(file) as stream:
        missing = missing_bytes(stream)
    if missing:
        raise RefusedError(Reason.VIDEO_DAMAGED, f"at least {missing} bytes are missing")
    return missing is not None


def scan(container: Any, video: Any, *, is_whole: bool) -> Scan:
    """Reads every packet of the container, and decodes none.

    Raises:
        RefusedError: one of the video is cut, or there is none.
    """
    spots: list[Spot] = []
    end = 0.0
    for packet in container.demux():
        at = packet.dts if packet.pts is None else packet.pts
        if not packet.size or at is None:
            continue
        if packet.stream.index != video.index:
            end = max(end, float((at + (packet.duration or 0)) * packet.time_base))
            continue
        spots.append(_spot(packet, video))
        # What comes before the first key frame is not needed.
        if packet.is_corrupt and any(spot.is_key for spot in spots):
            raise RefusedError(Reason.VIDEO_DAMAGED, f"the packet of frame {len(spots)} is cut")
    if not any(not spot.is_hidden for spot in spots):
        raise RefusedError(Reason.VIDEO_DAMAGED, "it holds no frame")
    return Scan(
        spots=tuple(spots),
        end_of_others=end,
        format=container.format.name,
        promised_end=_promised_end(container, video, is_whole=is_whole),
    )


def _spot(packet: Any, video: Any) -> Spot:
    hidden = packet.is_discard
    if video.codec_context.name == "vp8":
        hidden |= not bytes(packet)[0] & _VP8_SHOWN
    return Spot(
        at=packet.pts,
        decoded=packet.dts,
        duration=max(0, packet.duration or 0),
        is_key=packet.is_keyframe,
        is_hidden=hidden,
        is_corrupt=packet.is_corrupt,
    )


def _promised_end(container: Any, video: Any, *, is_whole: bool) -> float | None:
    name, start = container.format.name, (container.start_time or 0) / 1e6
    if "mpeg" in name:  # FFmpeg has it from the packets themselves
        return None
    if "avi" in name:
        rate, frames = float(video.average_rate or 0), video.frames
        is_placeholder = frames >= 1 << 30  # of FFmpeg, where it writes to a pipe
        return start + frames / rate if rate and frames and not is_placeholder else None
    if container.duration is None:
        return None
    length = container.duration / 1e6
    if "mov" in name:
        return start + length
    # Matroska and others: the end, or the length, depending on who wrote it. A file whose bytes
    # are all there is whole however long its last frame stays.
    return None if is_whole else length


def from_start(container: Any, video: Any, *, drop_leading: bool) -> Iterator[Any]:
    """Packets from the first key frame on.

    Frames that are decoded after it and shown before it may need frames that are not there:
    `drop_leading` leaves them out.
    """
    early, first = [], None
    for packet in _filled(container, video):
        if first is None and packet.size:
            if not packet.is_keyframe:
                early.append(packet)
                continue
            first = packet.pts if packet.pts is not None else packet.dts
            if first is None:
                first = -(2**63)
        elif first is None:
            yield from early  # no packet claims to be a key frame
        if drop_leading and packet.pts is not None and packet.pts < (first or 0):
            continue
        yield packet


def near(container: Any, video: Any, wanted: int) -> Iterator[Any]:
    """Packets from the last key frame that is shown no later than `wanted`, without leading ones.

    Nothing where there is no such key frame, or a packet has no time.
    """
    if any(name in container.format.name for name in _INDEXED):
        _seek(container, video, wanted)
    packets, held, later = _filled(container, video), [], 0
    for packet in packets:
        if packet.size and packet.pts is None:
            return
        if packet.size and packet.is_keyframe and packet.pts <= wanted:
            held = [packet]
        elif held and not (packet.size and packet.pts < held[0].pts):
            held.append(packet)
        later += packet.size > 0 and packet.pts > wanted
        if later > _REORDERED:
            break
    first = held[0].pts if held else 0
    yield from held
    for packet in packets if held else ():
        if packet.size and packet.pts is None:
            return
        if not packet.size or packet.pts >= first:
            yield packet


def _seek(container: Any, video: Any, wanted: int) -> None:
    """To a key frame that is shown no later than `wanted`.

    Tables give decoding times: the key frame that is decoded before may be shown after it.
    """
    container.seek(wanted, stream=video)
    packet = next(container.demux(video))  # an empty one, without times, where the file ends
    if packet.pts is not None and packet.pts > wanted and packet.dts is not None:
        wanted = min(wanted, packet.dts) - 1
    container.seek(wanted, stream=video)


def _filled(container: Any, video: Any) -> Iterator[Any]:
    """Packets, the last of which is empty and flushes the decoder."""
    for packet in container.demux(video):
        if packet.size or packet.dts is None:  # an empty one inside would flush it too early
            yield packet


def decoded(packets: Iterator[Any]) -> Iterator[Any]:
    """Frames in the order in which they are shown.

    Raises:
        RefusedError: one is damaged.
    """
    for packet in packets:
        for frame in packet.decode():
            if frame.is_corrupt:
                raise RefusedError(Reason.VIDEO_DAMAGED, f"the frame at {frame.time} s is damaged")
            yield frame
