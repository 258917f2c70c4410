"""Turns frames of a video opened by PyAV into upright pictures.

1. `first_film`, `stored_packets`, `decode_packets`  open file -> decoded frames
2. `picture_of`, `turn_of`  frame -> its picture, and the turn that makes it upright
3. `look_of`                properties that must not change within a clip
4. `upright_pictures`       all of these, for a whole file

Data preparation and generation share these functions.
"""

# H rows, W columns

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from PIL import Image

from dit.codecs.rgb import to_rgb

ENDINGS = frozenset((
    ".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts",
    ".3gp", ".flv", ".ogv", ".wmv",
))  # fmt: skip
"""Lower-case endings of video files, with the dot."""
LARGEST = 2 * (Image.MAX_IMAGE_PIXELS or 2**27)
"""Most pixels of a frame; Pillow refuses larger pictures as decompression bombs."""
# Without these options FFmpeg conceals damage, and a few bytes of a file can claim all memory.
LIMITS = {"err_detect": "explode", "max_pixels": str(LARGEST)}
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # FFmpeg's own decoders leave it out
_WITH_COLOURS = ("mov", "matroska")  # containers that may state colours themselves
UNTOLD = 2
"""Code for unspecified matrix coefficients of colours (ITU-T H.273, table 4)."""
_HEVC_ALPHA = b"\x4e\x01\xa5"  # a message (SEI) of kind 165, alpha channel information
_TURNS = {  # (whether x and y are swapped, then left and right, then top and bottom) -> operation
    (False, False, False): None,
    (False, True, False): Image.Transpose.FLIP_LEFT_RIGHT,
    (False, False, True): Image.Transpose.FLIP_TOP_BOTTOM,
    (False, True, True): Image.Transpose.ROTATE_180,
    (True, False, False): Image.Transpose.TRANSPOSE,
    (True, True, False): Image.Transpose.ROTATE_270,
    (True, False, True): Image.Transpose.ROTATE_90,
    (True, True, True): Image.Transpose.TRANSVERSE,
}
_SIDEWAYS = frozenset(turn for (transposed, *_), turn in _TURNS.items() if transposed)
_CROOKED = 0.02  # part of the largest element that an element of a quarter turn may have; 1 degree


def any_title() -> Any:
    """Keyword arguments of `av.open` with which metadata in any encoding raise no error."""
    import av

    is_old = int(av.__version__.partition(".")[0]) < 19  # PyAV 19 reads them by itself
    return {"metadata_errors": "replace"} if is_old else {}


def first_film(container: Any) -> Any:
    """The first video stream of `container` that is no cover picture; None if there is none."""
    return next(iter(films_of(container)), None)


def films_of(container: Any) -> list[Any]:
    """The video streams of `container` that are no cover pictures."""
    from av.stream import Disposition

    each = container.streams.video
    return [stream for stream in each if not stream.disposition & Disposition.attached_pic]


def stored_packets(container: Any, film: Any) -> Iterator[Any]:
    """Yields the packets of the stream `film` that have content, then an empty one.

    The empty packet makes the decoder return its last frames.
    """
    for packet in container.demux(film):
        if packet.size or packet.dts is None:  # an empty one in between would flush too early
            yield packet


def decode_packets(packets: Iterator[Any], video: Any) -> Iterator[Any]:
    """Yields the decoded frames of `packets`, in the order in which they are shown.

    `video` is the stream of the packets. WebM stores transparency in a second stream; then each
    frame gets the frame of that stream as its attribute `opaque`, which FFmpeg leaves to its user.

    Raises:
        ValueError: a frame is damaged.
    """
    decoder, codec = _alpha_decoder(video), video.codec_context
    # FFmpeg starts with the colours that it found when it probed the file, perhaps in a later part.
    # Its H.264 decoder keeps these colours if the first part states none.
    if codec.name == "h264" and not any(n in video.container.format.name for n in _WITH_COLOURS):
        codec.color_range, codec.colorspace = 0, UNTOLD
    for packet in packets:
        clear = {} if decoder is None else {frame.pts: frame for frame in decoder.decode(packet)}
        for frame in packet.decode():
            if frame.is_corrupt or (decoder is not None and frame.pts not in clear):
                when = "" if frame.time is None else f" at {frame.time:.3f} s"
                raise ValueError(f"a frame{when} is damaged; replace the file, or cut the video")
            if decoder is not None:
                frame.opaque = clear[frame.pts]
            yield frame


def tells_alpha(video: Any) -> bool:
    """Whether `video` declares transparency, which its decoder may ignore."""
    tags = {name.lower(): value for name, value in video.metadata.items()}
    return tags.get("alpha_mode") == "1" or bool(_hevc_alpha(video))


def is_premultiplied(video: Any) -> bool:
    """Whether `video` declares that colours are premultiplied by the alpha channel."""
    message = _hevc_alpha(video)
    return bool(message) and message[1] >> 4 & 7 == 1  # alpha_channel_use_idc


def _hevc_alpha(video: Any) -> bytes:
    """The alpha channel information in the header of an HEVC stream; empty if there is none.

    The first byte of the result is the length of the information (ITU-T H.265, annex F).
    """
    header = video.codec_context.extradata or b""
    is_there = video.codec_context.name == "hevc" and _HEVC_ALPHA in header
    return header.partition(_HEVC_ALPHA)[2] if is_there else b""


def _alpha_decoder(video: Any) -> Any:
    """A decoder of the transparency of a WebM video; None for others, or if FFmpeg lacks it."""
    import av.codec.codec

    name = _WITH_ALPHA.get(video.codec_context.name)
    if name is None or not tells_alpha(video):
        return None
    try:
        decoder = av.CodecContext.create(name, "r")
    except av.codec.codec.UnknownCodecError:
        return None
    decoder.options = LIMITS
    return decoder


def picture_of(frame: Any, video: Any) -> Image.Image:
    """Converts a decoded frame to a picture, not yet turned upright: RGB, or RGBA if it has alpha.

    A frame whose pixels are not square is resampled to square pixels.

    Raises:
        ValueError: the picture would have more than `LARGEST` pixels.
    """
    picture = frame.to_image()
    if has_alpha(frame, video):
        picture = _with_alpha(picture, frame, video)
    size = _square(frame, video)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.LANCZOS)


def upright_size(frame: Any, video: Any) -> tuple[int, int]:
    """(width, height) of a frame after it is turned upright, in square pixels.

    Raises:
        ValueError: the frame would have more than `LARGEST` pixels.
    """
    width, height = _square(frame, video)
    is_sideways = turn_of(frame) in _SIDEWAYS
    return (height, width) if is_sideways else (width, height)


def turn_of(frame: Any) -> Image.Transpose | None:
    """The rotation or mirroring that makes `frame` upright; None if it is upright.

    The display matrix is that of ISO/IEC 14496-12, 6.2.2: a pixel in column p and row q is shown in
    column a p + c q and row b p + d q. The nearest of the eight rotations and mirrorings is
    returned.
    """
    a, b, c, d = _matrix(frame)
    if abs(b) + abs(c) > abs(a) + abs(d):
        return _TURNS[True, c < 0, b < 0]
    return _TURNS[False, a < 0, d < 0]


class Look(NamedTuple):
    """Size, pixel aspect and rotation of a frame; frames of one clip must have the same."""

    size: tuple[int, int]  # width, height as stored
    aspect: Fraction  # of a pixel, width to height
    turn: Image.Transpose | None
    tells_turn: bool  # whether the frame states `turn`; in some streams only the first frame does

    def differs(self, first: Look) -> bool:
        """Whether this frame cannot belong to a clip whose first frame has the look `first`."""
        is_turned = self.tells_turn and self.turn != first.turn
        return is_turned or (self.size, self.aspect) != (first.size, first.aspect)

    def __str__(self) -> str:
        told = [] if self.turn is None else [self.turn.name.lower().replace("_", " ")]
        if self.aspect != 1:
            told.append(f"pixels of {self.aspect.numerator}:{self.aspect.denominator}")
        return f"{self.size[0]} x {self.size[1]}" + (f" ({', '.join(told)})" if told else "")


def look_of(frame: Any, aspect: Fraction = Fraction(1)) -> Look:
    """The size, pixel aspect and rotation of `frame`.

    `aspect` is the width of a pixel by its height, which only the decoder knows.
    """
    is_told = frame.side_data.get("DISPLAYMATRIX") is not None
    return Look((frame.width, frame.height), aspect, turn_of(frame), is_told)


def is_crooked(frame: Any) -> bool:
    """Whether the frame is rotated by an angle that is more than a degree off a multiple of 90."""
    a, b, c, d = map(abs, _matrix(frame))
    return min(max(a, d), max(b, c)) > _CROOKED * max(a, b, c, d)


def _matrix(frame: Any) -> tuple[int, int, int, int]:
    """The elements a, b, c and d of a frame's display matrix; the identity if it has none."""
    content = frame.side_data.get("DISPLAYMATRIX")
    if content is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(content))
    return a, b, c, d


def has_alpha(frame: Any, video: Any) -> bool:
    """Whether the format of `frame` has an alpha channel, even if every pixel is opaque."""
    # `opaque` is what `decode_packets` attaches. Palettes of most codecs have no transparency.
    layout = (frame.opaque or frame).format
    is_of_png = layout.has_palette and video.codec_context.name == "png"
    return is_of_png or any(part.is_alpha for part in layout.components)


def _with_alpha(picture: Image.Image, frame: Any, video: Any) -> Image.Image:
    alpha_HW = (frame.opaque or frame).to_ndarray(format="rgba")[..., 3].copy()
    # The fourth byte of uncompressed pixels is often unused, and then 0.
    if video.codec_context.name == "rawvideo" and not alpha_HW.any():
        return picture
    bands = (*picture.split(), Image.fromarray(alpha_HW))
    return Image.merge("RGBa" if is_premultiplied(video) else "RGBA", bands).convert("RGBA")


def _square(frame: Any, video: Any) -> tuple[int, int]:
    """(width, height) of a frame with square pixels, before it is turned upright.

    Raises:
        ValueError: these are more than `LARGEST` pixels.
    """
    aspect: Fraction | None = video.sample_aspect_ratio
    size = max(1, round(frame.width * (aspect or 1))), frame.height
    if size[0] * size[1] > LARGEST:
        raise ValueError(
            f"a frame of {size[0]} x {size[1]} pixels has more than {LARGEST} pixels; scale the"
            " video down"
        )
    return size


def upright_pictures(container: Any, video: Any) -> Iterator[Image.Image]:
    """Yields all frames of a video stream as upright RGB pictures, on white where transparent.

    Raises:
        ValueError: a frame is damaged or has more than `LARGEST` pixels, or its size, aspect or
            rotation differs from that of the first frame.
    """
    first: Look | None = None
    for frame in decode_packets(stored_packets(container, video), video):
        look = look_of(frame, video.codec_context.sample_aspect_ratio or Fraction(1))
        first = first or look
        if look.differs(first):
            when = "later" if frame.time is None else f"at {frame.time:.3f} s"
            raise ValueError(
                f"its pictures change from {first} to {look} {when}: cut the video there"
            )
        picture = to_rgb(picture_of(frame, video))
        yield picture if first.turn is None else picture.transpose(first.turn)
