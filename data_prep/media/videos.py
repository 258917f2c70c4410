"""A video file -> presentation times of its frames; frames -> upright pictures.

1. timeline      times of the frames, always by PyAV, which contains its own FFmpeg
2. frames        kept frames by PyAV
3. VideoDecoder  kept frames by PyAV or torchcodec

Reading starts at the key frame before the first frame that is kept
and stops after the last; only kept frames are converted.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from data_prep.media.clips import Entry
from data_prep.media.images import open_media
from data_prep.media.video_packets import (
    PacketScan,
    check_whole,
    from_start,
    near,
    open_video,
    scan,
)
from data_prep.refusals import PrepError, Reason, RefusedError
from dit.codecs.frame_pictures import (
    decode_packets,
    films_of,
    has_alpha,
    is_crooked,
    picture_of,
    tells_alpha,
    turn_of,
    upright_size,
)
from dit.codecs.rgb import WHITE, to_rgb

_HDR = frozenset((16, 18))
"""Transfer characteristics PQ and HLG (ITU-T H.273, table 3)."""
_WIDE = frozenset((9, 11, 12))
"""Primaries of BT.2020, DCI-P3 and Display P3 (ITU-T H.273, table 2)."""
_UNKNOWN = 2  # matrix coefficients that a file does not tell (H.273, table 4)
_UNEVEN = 0.1  # part by which distances between frames may differ at a constant rate
_BACK = 10  # seconds; usual distance between key frames
_REORDERED = 16  # frames that a codec reorders, at most
_SLACK = 0.1  # seconds by which headers may be wrong
_ROUNDED = 0.002  # seconds that rounding takes from a clip: 1 ms at either end in Matroska


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The size of a video and the presentation times of its frames."""

    width: int  # in square pixels, upright
    height: int
    shown: tuple[int, ...]  # presentation time of each frame, rising, in units of `tick`
    tick: Fraction  # seconds
    duration: float  # seconds, including the last frame
    lost: int = 0  # frames at the start that cannot be decoded: they need frames before the file
    by_number: bool = False  # decoded frames have no times: they are found by counting
    has_alpha: bool = False  # frames may be transparent
    flaws: tuple[str, ...] = ()  # why its frames do not look as a player shows them

    @property
    def fps(self) -> float:
        """Mean frames a second."""
        return len(self.shown) / self.duration

    @property
    def is_uneven(self) -> bool:
        """Whether the frame rate varies."""
        gaps = [later - earlier for earlier, later in pairwise(self.shown)]
        # A tick coarser than the rate (1 ms in Matroska) makes equal distances differ by one.
        return bool(gaps) and max(gaps) - min(gaps) > max(1, _UNEVEN * max(gaps))

    @property
    def rounding(self) -> float:
        """Ticks by which its times may be rounded up; none where a tick is a frame, as in AVI."""
        gap = (self.shown[-1] - self.shown[0]) / max(1, len(self.shown) - 1)
        return 0.5 if gap > 2 else 0.0

    def numbers_of(self, shown: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of the frames that are shown at these times."""
        return tuple(bisect.bisect_left(self.shown, at) for at in shown)

    def fps_of(self, start: int, stop: int) -> float:
        """Mean frames a second of the frames number `start` to `stop` - 1."""
        if stop < len(self.shown):
            seconds = float((self.shown[stop] - self.shown[start]) * self.tick)
        else:
            seconds = self.duration - float((self.shown[start] - self.shown[0]) * self.tick)
        return (stop - start) / max(seconds, float(self.tick))


def timeline(file: Path | BinaryIO) -> Timeline:
    """Presentation times: from the packets if they tell them, else from decoding all frames.

    Raises:
        RefusedError: it is no video, holds no frame, or ends before it should.
    """
    is_whole = check_whole(file)
    with open_video(file) as (container, video):
        found = scan(container, video, is_whole=is_whole)
        tick = Fraction(video.time_base)
        told = float(video.average_rate or 0)
    first, shown, by_number = _shown(file, found)
    if "mpeg" in found.format and _has_hole(shown):
        raise RefusedError(Reason.VIDEO_DAMAGED, "frames before its last ones are missing")
    end = _end(found, shown, tick)
    ends = max(found.end_of_others, float(end * tick))
    if found.promised_end is not None and ends < found.promised_end - 0.9 / (told or 25) - _SLACK:
        detail = f"it ends at {ends:.1f} s, its header says {found.promised_end:.1f} s"
        raise RefusedError(Reason.VIDEO_DAMAGED, detail)
    duration = float((end - shown[0]) * tick)
    if told and abs(len(shown) / told - duration) <= _ROUNDED:
        duration = len(shown) / told
    return Timeline(
        width=first.size[0],
        height=first.size[1],
        shown=tuple(shown),
        tick=tick,
        duration=duration,
        lost=sum(at < shown[0] for at in found.times),
        by_number=by_number,
        has_alpha=first.has_alpha,
        flaws=first.flaws,
    )


def packet_times(file: Path | BinaryIO) -> list[int]:
    """Presentation times of all packets, rising, also of frames that cannot be decoded."""
    with open_video(file) as (container, video):
        return scan(container, video, is_whole=True).times


def is_plain(file: Path | BinaryIO) -> bool:
    """Whether its first frame is neither turned, mirrored nor transparent.

    Raises:
        RefusedError: no frame of it can be decoded.
    """
    first = _first_frame(file)
    return first.turn is None and not first.has_alpha


def _has_hole(shown: list[int]) -> bool:
    """Whether frames of a constant rate have a gap, and only near their end."""
    # Reordered frames are stored before frames that are shown earlier: a truncated stream lacks
    # some of the latter.
    gaps = [later - earlier for earlier, later in pairwise(shown)]
    usual = median(gaps) if gaps else 0
    odd = [number for number, gap in enumerate(gaps) if abs(gap - usual) > max(1, usual / 2)]
    is_late = bool(odd) and odd[0] >= len(gaps) - _REORDERED
    return is_late and max(gaps[odd[0] :]) > usual and len(gaps) > 2


def _end(found: PacketScan, shown: list[int], tick: Fraction) -> int:
    """End of the last frame, which is shown as long as its packet says, or as the others are."""
    gap = (shown[-1] - shown[0]) // max(1, len(shown) - 1)
    last = max((info.duration for info in found.packets if info.at == shown[-1]), default=0)
    return shown[-1] + (last or gap or max(1, round(1 / (25 * tick))))


class _FirstFrame(NamedTuple):
    size: tuple[int, int]  # upright
    turn: Image.Transpose | None
    has_alpha: bool
    flaws: tuple[str, ...]


def _shown(file: Path | BinaryIO, found: PacketScan) -> tuple[_FirstFrame, list[int], bool]:
    """The first frame, the times of all, and whether decoded frames lack times."""
    most = 1 if found.tells_all else None
    try:
        first, times = _first_and_times(file, _all, most)
    except RefusedError:
        first, times = _first_and_times(file, _without_leading, most)
        is_counted = False
    else:
        is_counted = True
    if found.tells_all:
        return first, found.times, False
    given = [at for at in times if at is not None]
    if given == sorted(set(given)) and len(given) == len(times):
        return first, given, False
    # Decoded frames come in the right order even where their times are wrong.
    for candidates in (found.times, sorted(set(given))):
        if is_counted and len(candidates) == len(times):
            return first, candidates, True
    raise RefusedError(Reason.VIDEO_DAMAGED, "the times of its frames do not rise")


def _first_and_times(
    file: Path | BinaryIO, decode: Decode, most: int | None = None
) -> tuple[_FirstFrame, list[int | None]]:
    """The first frame, and times of `most` frames.

    Raises:
        RefusedError: one of them cannot be decoded, or there is none.
    """
    first, times = None, []
    with open_video(file) as (container, video):
        for frame in islice(decode(container, video), most):
            times.append(frame.pts)
            if first is None:
                first = _FirstFrame(
                    size=upright_size(frame, video),
                    turn=turn_of(frame),
                    has_alpha=has_alpha(frame, video),
                    flaws=_flaws_of(frame, video),
                )
    if first is None:
        raise RefusedError(Reason.VIDEO_DAMAGED, "no frame of it can be decoded")
    return first, times


def _first_frame(file: Path | BinaryIO) -> _FirstFrame:
    try:
        return _first_and_times(file, _all, 1)[0]
    except RefusedError:
        return _first_and_times(file, _without_leading, 1)[0]


def _flaws_of(frame: Any, video: Any) -> tuple[str, ...]:
    flaws = ()
    if video.codec_context.color_trc in _HDR:
        flaws += ("HDR video: colours are pale, as those of SDR are assumed; convert it to SDR",)
    elif video.codec_context.color_primaries in _WIDE:
        flaws += ("SDR video in BT.2020 or P3: colours are pale, as BT.709 is assumed; convert it",)
    if frame.interlaced_frame:
        flaws += ("interlaced video: a frame has the lines of two moments; deinterlace it",)
    if _is_untold_hd(frame):
        flaws += (
            "HD video that does not tell its colour matrix: read as BT.601, as FFmpeg does, while"
            " players take BT.709; write the right one into the file",
        )
    films = films_of(video.container)
    if len(films) > 1:
        flaws += (f"{len(films)} video streams in a file: only the first is read",)
    if is_crooked(frame):
        flaws += ("turned by an angle that is no quarter turn: the nearest one is taken",)
    if tells_alpha(video) and not has_alpha(frame, video):
        flaws += ("transparency that this PyAV does not decode (HEVC: 19 or later does)",)
    return flaws


def _is_untold_hd(frame: Any) -> bool:
    """Whether players guess BT.709, which FFmpeg does not: above the sizes of television in SD."""
    is_hd = frame.width >= 1280 or frame.height > 576
    has_colours = len(frame.format.components) > 2 and not frame.format.is_rgb
    return is_hd and has_colours and int(frame.colorspace) == _UNKNOWN


# A way to decode an open video: (container, stream) -> frames.
Decode = Callable[[Any, Any], Iterator[Any]]


def _all(container: Any, video: Any) -> Iterator[Any]:
    return decode_packets(from_start(container, video, drop_leading=False), video)


def _without_leading(container: Any, video: Any) -> Iterator[Any]:
    return decode_packets(from_start(container, video, drop_leading=True), video)


def _near(wanted: int, earlier: int = 0) -> Decode:
    """Decodes from the key frame `earlier` seconds before `wanted`.

    Yields nothing where the first frame is no key frame, against what its packet says.
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
    """The frames shown at the times `keep`, which rise and may repeat, as upright RGB pictures.

    Those that are transparent are put on `background`, or are RGBA where it is None.
    `numbers` has the number of each, from 0, where decoded frames have no times. Where decoding
    from the nearest key frame fails or misses a frame (it may need earlier frames), it is tried
    again from an earlier key frame, and at last from the start of the file.

    Raises:
        RefusedError: one of them cannot be decoded.
    """
    wanted, errors = list(numbers or keep), []
    turn = _first_frame(file).turn  # a stream may tell it with its first frame alone
    attempts = (
        (_all,) if numbers else (_near(keep[0]), _near(keep[0], _BACK), _all, _without_leading)
    )
    for decode in attempts:
        try:
            for picture in _pictures(file, decode, wanted, by_number=bool(numbers)):
                upright = picture if turn is None else picture.transpose(turn)
                yield upright if background is None else to_rgb(upright, background)
            return
        except RefusedError as error:
            errors.append(error)
    raise errors[-2:][0]  # the error of `_all`


def _pictures(
    file: Path | BinaryIO, decode: Decode, wanted: list[int], *, by_number: bool
) -> Iterator[Image.Image]:
    """Pictures of the frames `wanted` as stored; each is removed from that list."""
    with open_video(file) as (container, video):
        for number, frame in enumerate(decode(container, video)):
            at = number if by_number else frame.pts
            if at is None or at < wanted[0]:
                continue
            if at > wanted[0]:
                break
            picture = picture_of(frame, video)
            while wanted and wanted[0] == at:
                wanted.pop(0)
                yield picture
            if not wanted:
                return
        where = (
            f"number {wanted[0]}" if by_number else f"at {float(wanted[0] * video.time_base):.3f} s"
        )
        raise RefusedError(Reason.VIDEO_DAMAGED, f"the frame {where} is missing")


class VideoDecoder(StrEnum):
    """Values of `--video_loader_type` that can decode."""

    PYAV = "pyav"
    TORCHCODEC = "torchcodec"

    def check(self) -> None:
        """Raises PrepError where the library is not installed, or finds no FFmpeg."""
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
        """The frames that `entry` keeps, in its order, as upright pictures.

        They are RGB, and RGBA where they have transparency.

        Raises:
            RefusedError: one of them cannot be decoded.
        """
        # torchcodec finds frames by their times only.
        if self is VideoDecoder.PYAV or entry.numbers:
            return frames(file, entry.keep, entry.numbers, background=None)
        return _frames_of_torchcodec(file, entry)


def _torchcodec() -> Any:
    from torchcodec.decoders import VideoDecoder as Decoder  # type: ignore[import-not-found]

    return Decoder


def _frames_of_torchcodec(file: Path | BinaryIO, entry: Entry) -> Iterator[Image.Image]:
    """Frames by torchcodec; from the first one that it does not find, by PyAV."""
    given = 0
    with open_media(file) as stream:
        try:
            for picture in _found_by_torchcodec(stream, entry):
                yield picture
                given += 1
        except (RuntimeError, ValueError, LookupError):
            yield from frames(stream, entry.keep[given:], background=None)


def _found_by_torchcodec(stream: BinaryIO, entry: Entry) -> Iterator[Image.Image]:
    """Frames by torchcodec; raises LookupError at the first one that it does not find.

    torchcodec seeks by tables, which MPEG transport and program streams do not have. It leaves out
    transparency and mirrors, and turns frames only as their container says.
    """
    if not is_plain(stream):
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
        # torchcodec does not make pixels square.
        is_square = picture.size == size
        yield picture if is_square else picture.resize(size, Image.Resampling.LANCZOS)
