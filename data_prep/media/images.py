"""Reads image files as upright pixels and RGB, and recognises kinds of files by first bytes."""

# C colour channels, F frames, H rows, W columns

from __future__ import annotations

import io
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, ParamSpec

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from data_prep.refusals import Reason, RefusedError
from dit.codecs import rgb
from dit.codecs.picture_colours import told_colours
from dit.codecs.rgb import upright
from dit.system_errors import reason

P = ParamSpec("P")

# Listed, so that Pillow's readers of documents and videos never run on files of other people.
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "TGA", "TIFF")
FORMATS += ("WEBP",)
_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)  # EXIF 2.32
_WIDTH, _HEIGHT = 0x0100, 0x0101  # TIFF 6.0
_TAIL = 1 << 17  # bytes at the end of a PNG that are searched
_BEHIND = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif")
"""What the end of a PNG contains if its EXIF or XMP, which may rotate it, follows the pixels."""

HEAD = 512
"""Number of bytes at the start of a file that show its kind."""
_HTML = "it is an HTML page, probably of a failed download: fetch it again"
VIDEO = "it is a video: pack it with `data_prep video`"
_CONVERT = "convert it to JPEG or PNG"
_KINDS: tuple[tuple[bytes, str], ...] = (  # regular expression, what it is and what to do
    (rb"version https://git-lfs", "it is a pointer of Git LFS: `git lfs pull` fetches the file"),
    (rb"(?i)\s*(<!doctype html|<html|<head|<body)", _HTML),
    (rb"(?i)\s*(<\?xml|<svg|<!doctype svg)", f"it is SVG or XML: {_CONVERT}"),
    (rb"....ftyp(hei|hev|mif1|msf1)", f"it is HEIC: {_CONVERT}"),
    (rb"....ftypavi[fs]", f"it is AVIF, which this Pillow does not read: {_CONVERT}"),
    (rb"\x00\x00\x00\x0cJXL |\xff\x0a", f"it is JPEG XL: {_CONVERT}"),
    (rb"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI |OggS|FLV\x01", VIDEO),
    (rb"%PDF|%!PS", f"it is a document, PDF or PostScript: {_CONVERT}"),
    (rb"8BPS", f"it is a document of Photoshop: {_CONVERT}"),
    (rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|Rar!|\x28\xb5\x2f\xfd", "it is an archive: unpack it"),
    (rb"\x00+\Z", "it begins with zeros alone, probably after a broken copy: copy it again"),
)  # fmt: skip
_IMAGES = (
    rb"P[1-7]\s|\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM|II\*\x00|MM\x00\*|\x00\x00\x00\x0cjP"
)


@cache
def readable_formats() -> tuple[str, ...]:
    """The formats of `FORMATS` that this build of Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@cache
def image_endings() -> frozenset[str]:
    """Lower-case file endings of the readable image formats, with the dot."""
    known = (*readable_formats(), "MPO")  # several JPEGs in one, which the JPEG reader opens
    registered = Image.registered_extensions().items()
    return frozenset(ending for ending, name in registered if name in known)


class ProbedImage(NamedTuple):
    """Size of an upright picture and its properties, from the header of its file."""

    size: tuple[int, int]  # width, height, upright
    is_animated: bool
    has_alpha: bool  # has an alpha channel or a transparent colour, even if all pixels are opaque
    flaws: tuple[str, ...]  # why its colours may be wrong


def open_image(file: Path | BinaryIO) -> Image.Image:
    """The first frame of an image file, completely decoded and upright.

    Raises:
        RefusedError: the file is empty, no image of `FORMATS`, damaged, cut short or suspiciously
            large.
    """
    with open_media(file) as stream, _damage_refused(stream):
        return _decode(stream)


def probe_image(file: Path | BinaryIO) -> ProbedImage:
    """Size and properties of an image file, read from its header alone if that suffices.

    Raises:
        RefusedError: the file is empty, no image of `FORMATS`, damaged, or suspiciously large.
    """
    with open_media(file) as stream, _damage_refused(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(stream, formats=readable_formats()) as image:
            # The other images of an MPO, which telephones write, are views of the same picture.
            is_animated = image.format != "MPO" and getattr(image, "is_animated", False)
            has_alpha = image.has_transparency_data
            flaws = told_colours(image).flaws
            size = _upright_size(image, stream)
            return ProbedImage(size, is_animated, has_alpha, flaws)


def _upright_size(image: Image.Image, stream: BinaryIO) -> tuple[int, int]:
    # PNG's own `getexif` decodes all pixels to look for EXIF behind them.
    exif = Image.Image.getexif(image)
    turn = exif.get(_ORIENTATION)
    if turn is None and image.format == "PNG" and _may_be_turned(stream):
        stream.seek(0)
        return _decode(stream).size
    # Pillow 11 and later give the upright size of a TIFF, earlier ones the stored one.
    is_tiff = image.format == "TIFF"
    width, height = (exif[_WIDTH], exif[_HEIGHT]) if is_tiff else image.size
    return (height, width) if turn in _SIDEWAYS else (width, height)


def _may_be_turned(stream: BinaryIO) -> bool:
    """Whether the end of a PNG file may hold EXIF or XMP, which may rotate the picture."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, size - _TAIL))
    end = stream.read()
    return any(mark in end for mark in _BEHIND)


@contextmanager
def open_media(file: Path | BinaryIO) -> Iterator[BinaryIO]:
    """Opens `file` for reading in binary; a stream is yielded as it is.

    Raises:
        RefusedError: the file is empty, is not a regular file, or cannot be read.
    """
    if not isinstance(file, Path):
        yield file
        return
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise RefusedError(Reason.UNREADABLE, "it is not a regular file; remove or replace it")
        if status.st_size == 0:
            raise RefusedError(Reason.EMPTY, "it has 0 bytes; copy or download it again")
        stream = file.open("rb")
    except OSError as error:
        raise RefusedError(Reason.UNREADABLE, reason(error)) from error
    with stream:
        yield stream


@contextmanager
def _damage_refused(stream: BinaryIO) -> Iterator[None]:
    try:
        yield
    except UnidentifiedImageError as error:
        stream.seek(0)
        head = stream.read(HEAD)
        if begins_as_image(head):
            raise RefusedError(
                Reason.DAMAGED, "its header cannot be read; copy or download it again"
            ) from error
        what = what_it_is(head) or "it is of another kind, or cut short; convert it to JPEG or PNG"
        raise RefusedError(Reason.NO_IMAGE, what) from error
    except Image.DecompressionBombError as error:
        size = str(error).partition(", could be")[0]  # without what it says about attacks
        raise RefusedError(Reason.TOO_LARGE, f"{size}; scale it down") from error
    except Exception as error:  # damage makes Pillow raise errors of any type
        raise RefusedError(
            Reason.DAMAGED, f"{type(error).__name__}: {error}; copy or download it again"
        ) from error


def _decode(stream: BinaryIO) -> Image.Image:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Image.open(stream, formats=readable_formats()) as image:
            turned = upright(image)
            is_tiff = image.format == "TIFF"
    # Pillow only warns of a TIFF that was cut short. In other formats the warning concerns EXIF.
    cut = [str(w.message) for w in warned if "Truncated File Read" in str(w.message)]
    if is_tiff and cut:
        raise OSError(cut[0])
    return turned


def _refusing(convert: Callable[P, Image.Image]) -> Callable[P, Image.Image]:
    """Wraps `convert`, a function of `dit.codecs.rgb`: its ValueError becomes a RefusedError.

    `convert` raises it if the range or mode of the pixels is unknown.
    """

    def converted(*args: P.args, **kwargs: P.kwargs) -> Image.Image:
        try:
            return convert(*args, **kwargs)
        except ValueError as error:
            raise RefusedError(Reason.PIXELS, str(error)) from error

    return converted


to_rgb, to_rgba = _refusing(rgb.to_rgb), _refusing(rgb.to_rgba)
to_8_bits = _refusing(rgb.to_8_bits)


def to_video(image: Image.Image, *, colours: int) -> Tensor:
    """Converts a picture to a video [colours, 1, H, W] of one frame, float32 in [-1, 1].

    `colours` is 1 for grey, 3 for RGB or 4 for RGBA.
    """
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[colours]
    image = image if image.mode == mode else image.convert(mode)
    levels_HWC = np.array(image).reshape(image.height, image.width, colours)
    return torch.from_numpy(levels_HWC).permute(2, 0, 1)[:, None].float() / 127.5 - 1


def to_levels(video_CFHW: Tensor) -> np.ndarray:
    """A video in [-1, 1] as uint8 [F, H, W, 3].

    Grey is repeated for the three colours, and transparent pixels are put on white.
    """
    levels_FHWC = ((video_CFHW.permute(1, 2, 3, 0) + 1) * 127.5).round().to(torch.uint8)
    if levels_FHWC.shape[-1] == 4:
        return rgb.on_white(levels_FHWC.numpy())
    return levels_FHWC.expand(-1, -1, -1, 3).numpy()


def what_it_is(head: bytes) -> str | None:
    """A clause that says what kind of file begins with `head`, with advice; None if unknown."""
    for pattern, words in _KINDS:
        if re.match(pattern, head, re.DOTALL):
            return words
    if head and head.isascii() and not re.search(rb"[\x00-\x08\x0e-\x1f]", head):
        return "it is text, not a picture or video; remove or replace it"
    return None


def begins_as_image(head: bytes) -> bool:
    """Whether `head`, the first bytes of a file, is the beginning of a known image format."""
    return re.match(_IMAGES, head, re.DOTALL) is not None
