"""Reads the packets of a video file, for times and key frames, without decoding.

1. `open_video`  file -> container and its video stream; errors become refusals
2. `scan`        reads every packet once: times, key frames, ends
3. `from_start`, `near`  the packets that a decoder needs, in its order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_prep.media.images import HEAD, VIDEO, open_media, what_it_is
from data_prep.media.truncation import missing_bytes
from data_prep.refusals import Reason, RefusedError
from dit.codecs.frame_pictures import LIMITS, any_title, first_film, stored_packets

_INDEXED = ("mov", "matroska")  # formats with a table of key frames, by which FFmpeg seeks
_REORDERED = 64  # after so many later frames no earlier one comes: codecs reorder at most 16
_VP8_SHOWN = 0x10  # bit show_frame in the first byte of a frame (RFC 6386, 9.1)


class PacketInfo(NamedTuple):
    """Times and kind of the frame in a packet."""

    at: int | None  # presentation time, in units of the stream
    decode_time: int | None  # decoding time
    duration: int
    is_key: bool
    is_hidden: bool  # by an edit list, or because its codec never shows it
    is_corrupt: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketScan:
    """What `scan` found: all packets of a video, in the order of decoding, and its end."""

    packets: tuple[PacketInfo, ...]
    end_of_others: float  # seconds; end of the longest other stream
    format: str
    promised_end: float | None  # seconds; end according to the header; None if it states none

    @property
    def times(self) -> list[int]:
        """Presentation times of all visible frames, rising, in units of the stream."""
        shown = [info for info in self.packets if not info.is_hidden]
        found = {info.decode_time if info.at is None else info.at for info in shown}
        return sorted(at for at in found if at is not None)

    @property
    def tells_all(self) -> bool:
        """Whether packets alone determine the presentation time of every decoded frame."""
        # MPEG streams have no table of frames: only decoding shows whether the last one is whole.
        # AVI stores no presentation times; FFmpeg guesses them where frames are reordered.
        shown = [info for info in self.packets if not info.is_hidden]
        if "mpeg" in self.format or not self.packets[0].is_key:
            return False
        if any(info.at is None for info in self.packets) or len(self.times) < len(shown):
            return False
        if "avi" in self.format and any(info.at != info.decode_time for info in self.packets):
            return False
        return self.times[:1] == [
            info.at for info in shown[:1]
        ]  # no frame before the first key frame


@contextmanager
def open_video(file: Path | BinaryIO) -> Iterator[tuple[Any, Any]]:
    """Yields the container of `file` and its first video stream.

    Raises:
        RefusedError: there is no video stream, or FFmpeg raises an error inside the context.
    """
    import av.error

    with open_media(file) as stream:
        stream.seek(0)
        try:
            container = av.open(stream, "r", **any_title())
        except (av.error.FFmpegError, OSError, ValueError) as error:
            stream.seek(0)
            what = what_it_is(stream.read(HEAD))
            why = getattr(error, "strerror", None) or str(error)  # without the path
            raise RefusedError(Reason.NO_VIDEO, why if what in (None, VIDEO) else what) from error
        with container:
            video = _film_of(container)
            video.thread_type = "NONE"  # with threads, errors of the last frames are lost
            video.codec_context.options = LIMITS
            try:
                yield container, video
            except (av.error.FFmpegError, OSError, ValueError, OverflowError, MemoryError) as error:
                is_ours = type(error) is ValueError  # PyAV raises classes of its own
                detail = str(error) if is_ours else f"{type(error).__name__}: {error}"
                raise RefusedError(Reason.VIDEO_DAMAGED, detail) from error


def _film_of(container: Any) -> Any:
    film = first_film(container)
    if film is None:
        sound = "sound without pictures" if container.streams.audio else "no video stream"
        raise RefusedError(Reason.NO_VIDEO, f"it holds {sound}; remove it, or give a video")
    if film.codec_context is None:
        raise RefusedError(Reason.NO_VIDEO, "its codec is unknown; convert it to H.264")
    if not film.time_base:
        raise RefusedError(
            Reason.VIDEO_DAMAGED, "it states no unit for the times of its frames; convert it again"
        )
    return film


def check_whole(file: Path | BinaryIO) -> bool:
    """Checks that `file` has all the bytes that its container says it should have.

    Returns True if it has, or False if the container does not state its length.

    Raises:
        RefusedError: bytes are missing.
    """
    with open_media(file) as stream:
        missing = missing_bytes(stream)
    if missing:
        raise RefusedError(
            Reason.VIDEO_DAMAGED, f"at least {missing} bytes are missing; copy or download it again"
        )
    return missing is not None


def scan(
    container: Any, video: Any, *, is_whole: bool, see: Callable[[Any], None] | None = None
) -> PacketScan:
    """Reads every packet of the container, and describes the packets of the stream `video`.

    `is_whole` says that the file is known to be complete. Each packet of `video` is also passed to
    `see`.

    Raises:
        RefusedError: a packet of the video is truncated, or no packet holds a visible frame.
    """
    packets: list[PacketInfo] = []
    end = 0.0
    for packet in container.demux():
        at = packet.dts if packet.pts is None else packet.pts
        if not packet.size or at is None:
            continue
        if packet.stream.index != video.index:
            end = max(end, float((at + (packet.duration or 0)) * packet.time_base))
            continue
        packets.append(_packet_info(packet, video))
        if see is not None:
            see(packet)
        # Packets before the first key frame are not needed.
        if packet.is_corrupt and any(info.is_key for info in packets):
            raise RefusedError(
                Reason.VIDEO_DAMAGED,
                f"the data of frame {len(packets)} are cut short; copy or download it again",
            )
    if not any(not info.is_hidden for info in packets):
        raise RefusedError(Reason.VIDEO_DAMAGED, "it holds no frame; remove or replace it")
    return PacketScan(
        packets=tuple(packets),
        end_of_others=end,
        format=container.format.name,
        promised_end=_promised_end(container, video, is_whole=is_whole),
    )


def _packet_info(packet: Any, video: Any) -> PacketInfo:
    hidden = packet.is_discard
    if video.codec_context.name == "vp8":
        hidden |= not bytes(packet)[0] & _VP8_SHOWN
    return PacketInfo(
        at=packet.pts,
        decode_time=packet.dts,
        duration=max(0, packet.duration or 0),
        is_key=packet.is_keyframe,
        is_hidden=hidden,
        is_corrupt=packet.is_corrupt,
    )


def _promised_end(container: Any, video: Any, *, is_whole: bool) -> float | None:
    name, start = container.format.name, (container.start_time or 0) / 1e6
    if "mpeg" in name:  # no header: FFmpeg estimates it from the packets
        return None
    if "avi" in name:
        rate, frames = float(video.average_rate or 0), video.frames
        is_placeholder = frames >= 1 << 30  # FFmpeg's number where it writes to a pipe
        return start + frames / rate if rate and frames and not is_placeholder else None
    if container.duration is None:
        return None
    length = container.duration / 1e6
    if "mov" in name:
        return start + length
    # Matroska and others: the end or the length, depending on the program that wrote it. A file
    # with all its bytes is complete, however long its last frame is shown.
    return None if is_whole else length


def from_start(container: Any, video: Any, *, drop_leading: bool) -> Iterator[Any]:
    """Yields the packets of a video from its first key frame on.

    Leading frames, which are decoded after the key frame and shown before it, may need frames that
    the file lacks; `drop_leading` leaves them out.
    """
    early, first = [], None
    for packet in stored_packets(container, video):
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
    """Yields packets from the last key frame that is shown at the time `wanted` or before.

    `wanted` is in units of the stream. Yields nothing if there is no such key frame, and stops at a
    packet that has no time.
    """
    if any(name in container.format.name for name in _INDEXED):
        _seek(container, video, wanted)
    packets, held, later = stored_packets(container, video), [], 0
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
    """Seeks to a key frame that is shown at the time `wanted` or before.

    Seek tables hold decoding times, and a key frame that is decoded before `wanted` may be shown
    after it.
    """
    container.seek(wanted, stream=video)
    packet = next(container.demux(video))  # at the end of the file it is empty and has no times
    if packet.pts is not None and packet.pts > wanted and packet.dts is not None:
        wanted = min(wanted, packet.dts) - 1
    container.seek(wanted, stream=video)
