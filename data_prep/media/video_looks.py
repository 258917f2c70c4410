"""Inspects the first frame of a video, and finds where size or orientation of pictures changes.

1. `first_frame`     the first frame that can be decoded
2. `frames_decoded`  the first frame and the times of others, from decoding them
3. `KeyFrames`       where the shape changes, from key frames alone

A phone that is turned, joined recordings or a call over a bad line change the shape of the pictures
inside a file: their size, pixel aspect or rotation, at a key frame. So key frames are decoded, each
alone, when packets are read. If every frame is a key frame, those with an unchanged header are
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_prep.media.video_packets import from_start, open_video
from data_prep.refusals import Reason, RefusedError
from dit.codecs.frame_pictures import (
    LIMITS,
    UNTOLD,
    Look,
    decode_packets,
    films_of,
    has_alpha,
    is_crooked,
    look_of,
    tells_alpha,
    upright_size,
)
from dit.codecs.icc_profiles import HDR

_WIDE = frozenset((9, 11, 12))
"""Colour primaries of BT.2020, DCI-P3 and Display P3 (ITU-T H.273, table 2)."""
_FULL = 2  # AVCOL_RANGE_JPEG
# Patterns of the headers that state size and pixel aspect, of codecs with key frames only.
_HEADERS = {
    "mjpeg": rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf].{7}|JFIF\0.{7}",  # ITU-T T.81, B.2.2
    "png": rb"IHDR.{13}|pHYs.{9}",
    "prores": rb"icpf.{8}.{8}",  # SMPTE RDD 36, 5.1
    "jpeg2000": rb"\xff\x4f\xff\x51.{38}",  # ITU-T T.800, A.5.1
}


# Function that decodes an open video: (container, stream) -> frames.
Decode = Callable[[Any, Any], Iterator[Any]]


def every_frame(container: Any, video: Any) -> Iterator[Any]:
    return decode_packets(from_start(container, video, drop_leading=False), video)


def without_leading(container: Any, video: Any) -> Iterator[Any]:
    return decode_packets(from_start(container, video, drop_leading=True), video)


class VideoStart(NamedTuple):
    """Upright size, shape and colours, alpha, and flaws of a video, from its first frame."""

    size: tuple[int, int]  # upright
    look: Look  # without its pixel aspect
    has_alpha: bool
    flaws: tuple[str, ...]


class Change(NamedTuple):
    """The first frame whose shape differs from that of earlier frames, and how it differs."""

    at: int  # number of the frame; if `KeyFrames` found it, its time in units of the stream
    words: str  # such as "from 640 x 480 to 480 x 640", with the shapes as texts


class Decoded(NamedTuple):
    """The first frame of a video, the times of all decoded frames, and where the shape changes."""

    first: VideoStart
    times: list[int | None]
    change: Change | None


def frames_decoded(file: Path | BinaryIO, decode: Decode, most: int | None = None) -> Decoded:
    """Decodes at most `most` frames of `file` (None: all) with the function `decode`.

    Returns the properties of the first frame, the times of all, and the first change of shape.

    Raises:
        RefusedError: a frame cannot be decoded, or there is none.
    """
    first, change, times = None, None, list[int | None]()
    with open_video(file) as (container, video):
        for frame in islice(decode(container, video), most):
            look = look_of(frame)
            if first is None:
                first = VideoStart(
                    size=upright_size(frame, video),
                    look=look,
                    has_alpha=has_alpha(frame, video),
                    flaws=_flaws_of(frame, video),
                )
            if change is None and look.differs(first.look):
                change = Change(len(times), f"from {first.look} to {look}")
            times.append(frame.pts)
    if first is None:
        raise RefusedError(
            Reason.VIDEO_DAMAGED, "no frame of the video can be decoded; copy or convert it again"
        )
    return Decoded(first, times, change)


def first_frame(file: Path | BinaryIO) -> VideoStart:
    """Decodes the first frame that can be decoded, and inspects it.

    Raises:
        RefusedError: no frame can be decoded.
    """
    try:
        return frames_decoded(file, every_frame, 1).first
    except RefusedError:
        return frames_decoded(file, without_leading, 1).first


def _flaws_of(frame: Any, video: Any) -> tuple[str, ...]:
    flaws = ()
    if video.codec_context.color_trc in HDR:
        flaws += ("HDR video: colours are pale, because SDR is assumed; convert it to SDR",)
    elif video.codec_context.color_primaries in _WIDE:
        flaws += (
            "SDR video in BT.2020 or P3: colours are pale, because BT.709 is assumed; convert it to"
            " BT.709",
        )
    if frame.interlaced_frame:
        flaws += ("interlaced video: a frame has the lines of two moments; deinterlace it",)
    if _is_untold_hd(frame):
        flaws += (
            "HD video that does not state its colour matrix: read as BT.601, as FFmpeg does, while"
            " players take BT.709; write the right matrix into the file",
        )
    films = films_of(video.container)
    if len(films) > 1:
        flaws += (f"{len(films)} video streams in a file: only the first is read",)
    if is_crooked(frame):
        flaws += ("turned by an angle that is no quarter turn: the nearest quarter turn is used",)
    if tells_alpha(video) and not has_alpha(frame, video):
        flaws += ("transparency that this PyAV does not decode (PyAV 19 or later does, for HEVC)",)
    return flaws


def _is_untold_hd(frame: Any) -> bool:
    """Whether `frame` is HD and states no colour space: FFmpeg assumes BT.601, players BT.709."""
    is_hd = frame.width >= 1280 or frame.height > 576
    has_colours = len(frame.format.components) > 2 and not frame.format.is_rgb
    return is_hd and has_colours and int(frame.colorspace) == UNTOLD


class KeyFrames:
    """Finds the first change of shape among the key frames of an open video, packet by packet."""

    def __init__(self, video: Any):
        self._video, self._first, self._headers = video, None, list[bytes]()
        self._pattern = _HEADERS.get(video.codec_context.name)
        self._told = set[str]()  # colour properties that the frames so far have stated
        self._is_shown = False  # whether a visible frame was seen; an edit list may hide others
        self.change: Change | None = None

    def see(self, packet: Any) -> None:
        """Inspects `packet`, the next packet of the video, if it holds a key frame.

        Sets `change` if its frame has another shape than the first one, or no longer states its
        colours. Packets must come in file order.
        """
        is_new = packet.is_keyframe and self.change is None and not self._has_known_header(packet)
        if is_new and (look := self._decoded(packet)) is not None:
            look, told = look
            if self._first is None or not self._is_shown:
                self._first, self._told = look, told
            elif packet.pts is not None and look.differs(self._first):
                self.change = Change(packet.pts, f"from {self._first} to {look}")
            elif packet.pts is not None and self._told - told:
                lost = " and ".join(sorted(self._told - told))
                self.change = Change(packet.pts, f"from a stated {lost} to none")
            self._told |= told
        self._is_shown |= not packet.is_discard

    def _has_known_header(self, packet: Any) -> bool:
        """Whether `packet` states the same size and pixel aspect as the last key frame.

        It is False for codecs whose frames are not all key frames.
        """
        if self._pattern is None:
            return False
        before = self._headers
        self._headers = re.findall(self._pattern, bytes(packet), re.DOTALL)
        return bool(before) and self._headers == before

    def _decoded(self, packet: Any) -> tuple[Look, set[str]] | None:
        """Shape of the packet's frame, and the colour properties it states; None if damaged."""
        import av.error

        codec, is_fresh = self._video.codec_context, self._video.codec_context.name == "h264"
        if is_fresh:  # a used decoder keeps the colours of earlier frames if this one states none
            codec = av.CodecContext.create("h264", "r")
            codec.extradata, codec.options = self._video.codec_context.extradata, LIMITS
        # Decoders return no frame of a hidden packet.
        packet = av.Packet(bytes(packet)) if packet.is_discard else packet
        try:
            frames = [*codec.decode(packet), *codec.decode(None)]
        except (av.error.FFmpegError, OSError, ValueError):
            return None  # the damage is reported when the kept frames are decoded
        finally:
            codec.flush_buffers()
        if not frames:
            return None
        told = {"full range"} if is_fresh and frames[0].color_range == _FULL else set[str]()
        told |= {"colour matrix"} if is_fresh and frames[0].colorspace != UNTOLD else set()
        # The decoder states the aspect of the last frame that it has read: only this one here.
        return look_of(frames[0], codec.sample_aspect_ratio or Fraction(1)), told
