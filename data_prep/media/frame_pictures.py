"""A decoded frame of PyAV -> a picture of square pixels, with its transparency, and its turn."""

# H rows, W columns

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

from PIL import Image

from data_prep.media.video_packets import LARGEST, is_premultiplied
from data_prep.refusals import Reason, RefusedError

_TURNS = {  # x and y change places; then left and right do; then top and bottom do
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


def picture_of(frame: Any, video: Any) -> Image.Image:
    """The frame of the stream `video`, not turned: RGB, or RGBA where it has transparency.

    Raises:
        RefusedError: it is suspiciously large.
    """
    picture = frame.to_image()
    if has_alpha(frame, video):
        picture = _with_alpha(picture, frame, video)
    size = _square(frame, video)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.LANCZOS)


def upright_size(frame: Any, video: Any) -> tuple[int, int]:
    """Width and height of its picture.

    Raises:
        RefusedError: it is suspiciously large.
    """
    width, height = _square(frame, video)
    is_sideways = turn_of(frame) in _SIDEWAYS
    return (height, width) if is_sideways else (width, height)


def turn_of(frame: Any) -> Image.Transpose | None:
    """What makes it upright, by its display matrix (ISO/IEC 14496-12, 6.2.2); None for nothing.

    A pixel in column p and row q is shown in column a p + c q and row b p + d q. The nearest of the
    eight ways to turn and mirror a picture is taken.
    """
    a, b, c, d = _matrix(frame)
    if abs(b) + abs(c) > abs(a) + abs(d):
        return _TURNS[True, c < 0, b < 0]
    return _TURNS[False, a < 0, d < 0]


def is_crooked(frame: Any) -> bool:
    """Whether it is turned by an angle that is no quarter turn."""
    a, b, c, d = map(abs, _matrix(frame))
    return min(max(a, d), max(b, c)) > _CROOKED * max(a, b, c, d)


def _matrix(frame: Any) -> tuple[int, int, int, int]:
    """The elements a, b, c and d of its display matrix."""
    content = frame.side_data.get("DISPLAYMATRIX")
    if content is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(content))
    return a, b, c, d


def has_alpha(frame: Any, video: Any) -> bool:
    """Whether its format has transparency; all of it may be opaque even so."""
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
    """Size of a frame with square pixels, before it is turned upright."""
    aspect: Fraction | None = video.sample_aspect_ratio
    size = max(1, round(frame.width * (aspect or 1))), frame.height
    if size[0] * size[1] > LARGEST:
        raise RefusedError(
            Reason.VIDEO_DAMAGED, f"{size[0]} x {size[1]} pixels: suspiciously large"
        )
    return size
