"""Reads video files: presentation times of all frames, and chosen frames as upright pictures.

1. timeline      times of the frames, always by PyAV, which contains its own FFmpeg
2. frames        kept frames by PyAV
3. VideoDecoder  kept frames by PyAV or torchcodec

Reading starts at the key frame before the first frame that is kept, and stops after the last one;
only kept frames are converted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple, Self

from PIL import Image

from data_prep.media.clips import Entry
from data_prep.media.images import open_media
from data_prep.media.video_looks import (
    Change,
    Decode,
    KeyFrames,
    VideoStart,
    every_frame,
    first_frame,
    frames_decoded,
    without_leading,
)
from data_prep.media.video_packets import PacketScan, check_whole, near, open_video, scan
from data_prep.refusals import PrepError, Reason, RefusedError
from dit.codecs.frame_pictures import Look, decode_packets, look_of, picture_of
from dit.codecs.rgb import WHITE, to_rgb

_UNEVEN = 0.1  # fraction by which the times between frames may differ at a constant rate
_BACK = 10  # seconds; usual distance between key frames
_REORDERED = 16  # frames that a codec reorders, at most
_SLACK = 0.1  # seconds by which headers may be wrong
_ENDS = "its size changes (or pixel aspect, rotation, stated colours): the clip ends there"
_ROUNDED = 0.002  # seconds that rounding takes from a clip: 1 ms at either end in Matroska


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Size of a video, presentation times of its frames, and properties of all its pictures."""

    width: int  # in square pixels, upright
    height: int
    shown: tuple[int, ...]  # presentation time of each frame, rising, in units of `tick`
    tick: Fraction  # seconds
    duration: float  # seconds, including the last frame
    lost: int = 0  # frames at the start that cannot be decoded: they need frames before the file
    by_number: bool = False  # decoded frames have no times: they are found by counting
    has_alpha: bool = False  # frames may be transparent
    flaws: tuple[str, ...] = ()  # why its frames do not look as a player shows them
    change: str = ""  # change of size, pixel aspect or rotation that ends it before the file ends
    left: int = 0  # frames of the file from that change on

    def steady(self) -> Self:
        """This timeline itself, if all pictures have one shape.

        Raises:
            RefusedError: the size, the pixel aspect or the rotation of the pictures changes.
        """
        if self.change:
            raise RefusedError(Reason.CHANGING, f"{self.change}; cut the file there")
        return self

    def counts_as(self, other: Timeline | None) -> bool:
        """Whether this video has as many frames as `other`.

        The frames of `other` are counted up to its change of shape, or in its whole file. `other`
        is None for a picture, which has one frame.
        """
        count, left = (1, 0) if other is None else (len(other.shown), other.left)
        return len(self.shown) in (count, count + left)

    @property
    def fps(self) -> float:
        """Mean number of frames per second."""
        return len(self.shown) / self.duration

    @property
    def is_uneven(self) -> bool:
        """Whether the frame rate varies."""
        gaps = [later - earlier for earlier, later in pairwise(self.shown)]
        # A tick coarser than the rate (1 ms in Matroska) makes equal distances differ by one.
        return bool(gaps) and max(gaps) - min(gaps) > max(1, _UNEVEN * max(gaps))

    @property
    def rounding(self) -> float:
        """Ticks by which times may be rounded up: 0.5, or 0 if a tick is about a frame (AVI)."""
        gap = (self.shown[-1] - self.shown[0]) / max(1, len(self.shown) - 1)
        return 0.5 if gap > 2 else 0.0

    def numbers_of(self, shown: tuple[int, ...]) -> tuple[int, ...]:
        """The indices of the frames that are shown at the times `shown`, in ticks."""
        return tuple(bisect.bisect_left(self.shown, at) for at in shown)

    def fps_of(self, start: int, stop: int) -> float:
        """Mean frame rate, in frames per second, of the frames `start` to `stop` - 1."""
        if stop < len(self.shown):
            seconds = float((self.shown[stop] - self.shown[start]) * self.tick)
        else:
            seconds = self.duration - float((self.shown[start] - self.shown[0]) * self.tick)
        return (stop - start) / max(seconds, float(self.tick))


def timeline(file: Path | BinaryIO) -> Timeline:
    """Reads the size of the video `file` and the presentation times of all its frames.

    The times come from its packets if these tell them all; else every frame is decoded.

    Raises:
        RefusedError: the file is not a video, holds no frame, or ends before it should.
    """
    is_whole = check_whole(file)
    with open_video(file) as (container, video):
        keys = KeyFrames(video)
        found = scan(container, video, is_whole=is_whole, see=keys.see)
        tick = Fraction(video.time_base)
        told = float(video.average_rate or 0)
    first, shown, by_number, change = _shown(file, found)
    change = change if by_number else _earlier(change, keys.change, shown)
    stop = len(shown) if change is None else change.at
    if "mpeg" in found.format and (_has_hole(shown[:stop]) or _has_hole(shown[stop:])):
        raise RefusedError(
            Reason.VIDEO_DAMAGED,
            "frames before its last ones are missing; copy or download it again",
        )
    end = _end(found, shown, tick)
    ends = max(found.end_of_others, float(end * tick))
    if found.promised_end is not None and ends < found.promised_end - 0.9 / (told or 25) - _SLACK:
        detail = (
            f"it ends at {ends:.1f} s, and its header says {found.promised_end:.1f} s; copy or"
            " download it again"
        )
        raise RefusedError(Reason.VIDEO_DAMAGED, detail)
    duration = float(((end if change is None else shown[stop]) - shown[0]) * tick)
    if told and abs(stop / told - duration) <= _ROUNDED:
        duration = stop / told
    return Timeline(
        width=first.size[0],
        height=first.size[1],
        shown=tuple(shown[:stop]),
        tick=tick,
        duration=duration,
        lost=sum(at < shown[0] for at in found.times),
        by_number=by_number,
        has_alpha=first.has_alpha,
        flaws=first.flaws + (() if change is None else (_ENDS,)),
        change="" if change is None else f"{change.words} at {duration:.3f} s",
        left=len(shown) - stop,
    )


def packet_times(file: Path | BinaryIO) -> list[int]:
    """Presentation times of all packets, rising, in units of the stream.

    They include the times of packets that cannot be decoded.
    """
    with open_video(file) as (container, video):
        return scan(container, video, is_whole=True).times


def _has_hole(shown: list[int]) -> bool:
    """Whether frames of a constant rate have a gap, and only near their end.

    `shown` are presentation times in ticks.
    """
    # Reordered frames are stored before frames that are shown earlier: a truncated stream lacks
    # some of the latter.
    gaps = [later - earlier for earlier, later in pairwise(shown)]
    usual = median(gaps) if gaps else 0
    odd = [number for number, gap in enumerate(gaps) if abs(gap - usual) > max(1, usual / 2)]
    is_late = bool(odd) and odd[0] >= len(gaps) - _REORDERED
    return is_late and max(gaps[odd[0] :]) > usual and len(gaps) > 2


def _end(found: PacketScan, shown: list[int], tick: Fraction) -> int:
    """The time in ticks at which the last frame ends.

    It follows from the duration of the frame's packet; if that is unknown, from the mean distance
    of the frames; and for a single frame, from 1/25 s.
    """
    gap = (shown[-1] - shown[0]) // max(1, len(shown) - 1)
    last = max((info.duration for info in found.packets if info.at == shown[-1]), default=0)
    return shown[-1] + (last or gap or max(1, round(1 / (25 * tick))))


class _Shown(NamedTuple):
    """The first frame of a video, and the presentation times of all frames in ticks."""

    first: VideoStart
    times: list[int]
    by_number: bool  # whether decoded frames lack times
    change: Change | None  # as far as frames were decoded


def _shown(file: Path | BinaryIO, found: PacketScan) -> _Shown:
    most = 1 if found.tells_all else None
    try:
        first, times, change = frames_decoded(file, every_frame, most)
    except RefusedError:
        first, times, change = frames_decoded(file, without_leading, most)
        is_counted = False
    else:
        is_counted = True
    if found.tells_all:
        return _Shown(first, found.times, False, change)
    given = [at for at in times if at is not None]
    if given == sorted(set(given)) and len(given) == len(times):
        return _Shown(first, given, False, change)
    # Decoded frames come in the right order even where their times are wrong.
    for candidates in (found.times, sorted(set(given))):
        if is_counted and len(candidates) == len(times):
            return _Shown(first, candidates, True, change)
    raise RefusedError(
        Reason.VIDEO_DAMAGED, "the times of its frames do not rise; convert it again"
    )


def _earlier(decoded: Change | None, of_keys: Change | None, shown: list[int]) -> Change | None:
    """The earlier of two changes of shape, or None; its `at` is the index of a frame.

    `decoded` was found in decoded frames; `of_keys` was found in key frames, and has a time as
    `at`. `shown` are the times of all frames.
    """
    number = len(shown) if of_keys is None else bisect.bisect_left(shown, of_keys.at)
    if of_keys is None or not 0 < number < len(shown):
        return decoded
    if decoded is not None and decoded.at <= number:
        return decoded
    return Change(number, of_keys.words)


def _near(wanted: int, earlier: int = 0) -> Decode:
    """A function that decodes from a key frame at least `earlier` seconds before `wanted`.

    `wanted` is a time in ticks. The last such key frame is used. The function yields nothing if the
    first decoded frame is not a key frame, although its packet says so.
    """

    def decode(container: Any, video: Any) -> Iterator[Any]:
        origin = wanted - int(earlier / video.time_base)
        frames = decode_packets(near(container, video, origin), video)
        for number, frame in enumerate(frames):
            if number == 0 and not frame.key_frame:
                return
            yield frame

    return decode


def frames(
    file: Path | BinaryIO,
    keep: tuple[int, ...],
    numbers: tuple[int, ...] = (),
    background: str | None = WHITE,
) -> Iterator[Image.Image]:
    """Yields the frames shown at the times `keep`, which rise and may repeat, as upright pictures.

    They are RGB: transparent frames are put on `background`, or stay RGBA if it is None. Times are
    in ticks. `numbers` has the index of each frame, from 0, if decoded frames have no times. If
    decoding from the nearest key frame fails or misses a frame (it may need earlier frames), it is
    tried again from an earlier key frame, and at last from the start of the file.

    Raises:
        RefusedError: a frame cannot be decoded, or has another size or rotation.
    """
    wanted, errors = list(numbers or keep), []
    first = first_frame(file).look
    attempts = (
        (every_frame,)
        if numbers
        else (_near(keep[0]), _near(keep[0], _BACK), every_frame, without_leading)
    )
    for decode in attempts:
        try:
            for picture in _pictures(file, decode, wanted, first, by_number=bool(numbers)):
                upright = picture if first.turn is None else picture.transpose(first.turn)
                yield upright if background is None else to_rgb(upright, background)
            return
        except RefusedError as error:
            errors.append(error)
    raise errors[-2:][0]  # the error of `every_frame`


def _pictures(
    file: Path | BinaryIO, decode: Decode, wanted: list[int], first: Look, *, by_number: bool
) -> Iterator[Image.Image]:
    """Yields the frames `wanted` (times in ticks, or numbers) as stored, not yet turned upright.

    A frame that is yielded is removed from the list `wanted`, so another attempt can continue with
    the remaining frames.

    Raises:
        RefusedError: a frame is missing, or its shape differs from that of the `first`.
    """
    with open_video(file) as (container, video):
        for number, frame in enumerate(decode(container, video)):
            at = number if by_number else frame.pts
            if at is None or at < wanted[0]:
                continue
            if at > wanted[0]:
                break
            look = look_of(frame)
            if look.differs(first):  # VP9 and AV1 can change without a key frame: no plan sees it
                where = f"number {at}" if by_number else f"{float(at * video.time_base):.3f} s"
                detail = f"from {first} to {look} at or before {where}; cut the file there"
                raise RefusedError(Reason.CHANGING, detail)
            picture = picture_of(frame, video)
            while wanted and wanted[0] == at:
                wanted.pop(0)
                yield picture
            if not wanted:
                return
        where = (
            f"number {wanted[0]}" if by_number else f"at {float(wanted[0] * video.time_base):.3f} s"
        )
        raise RefusedError(
            Reason.VIDEO_DAMAGED, f"the frame {where} is missing; copy or convert it again"
        )


class VideoDecoder(StrEnum):
    """Libraries that decode videos, as values of `--video_loader_type`."""

    PYAV = "pyav"
    TORCHCODEC = "torchcodec"

    def check(self) -> None:
        """Raises PrepError if the library is not installed or finds no FFmpeg."""
        if self is VideoDecoder.TORCHCODEC:
            try:
                _torchcodec()
            except (ImportError, OSError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                raise PrepError(
                    f"--video_loader_type torchcodec cannot be used here ({reason}). Install"
                    " torchcodec and the FFmpeg libraries that it calls, or leave the option out:"
                    " PyAV brings its own"
                ) from error

    def frames(self, file: Path | BinaryIO, entry: Entry) -> Iterator[Image.Image]:
        """Yields the frames that `entry` keeps, in presentation order, as upright pictures.

        They are RGB, or RGBA if they have transparency.

        Raises:
            RefusedError: a frame cannot be decoded.
        """
        # torchcodec finds frames by their times only.
        if self is VideoDecoder.PYAV or entry.numbers:
            return frames(file, entry.keep, entry.numbers, background=None)
        return _frames_of_torchcodec(file, entry)


def _torchcodec() -> Any:
    from torchcodec.decoders import VideoDecoder as Decoder  # type: ignore[import-not-found]

    return Decoder


def _frames_of_torchcodec(file: Path | BinaryIO, entry: Entry) -> Iterator[Image.Image]:
    """Yields the frames of `entry` by torchcodec, or by PyAV from the first one it misses."""
    given = 0
    with open_media(file) as stream:
        try:
            for picture in _found_by_torchcodec(stream, entry):
                yield picture
                given += 1
        except (RuntimeError, ValueError, LookupError):
            yield from frames(stream, entry.keep[given:], background=None)


def _found_by_torchcodec(stream: BinaryIO, entry: Entry) -> Iterator[Image.Image]:
    """Yields the frames of `entry` by torchcodec.

    torchcodec seeks by tables, which MPEG transport and program streams lack. It ignores
    transparency and mirroring, and rotates frames only as their container says.

    Raises:
        LookupError: torchcodec misses a frame, or would show the video differently.
    """
    first = first_frame(stream)
    if first.look.turn is not None or first.has_alpha:
        raise LookupError(entry.source)
    tick, size = Fraction(entry.tick), (entry.width, entry.height)
    # By number, because a search by time needs durations, which some files lack.
    numbers = {at: number for number, at in enumerate(packet_times(stream))}
    stream.seek(0)
    decoder = _torchcodec()(stream, dimension_order="NHWC", seek_mode="exact")
    for at in entry.keep:
        frame = decoder.get_frame_at(numbers[at])
        if abs(frame.pts_seconds - float(at * tick)) > tick:
            raise LookupError(at)
        picture = Image.fromarray(frame.data.numpy())
        if picture.size != first.look.size:
            raise LookupError(at)
        # torchcodec does not make pixels square.
        is_square = picture.size == size
        yield picture if is_square else picture.resize(size, Image.Resampling.LANCZOS)
