"""One image file -> upright RGB pixels of a size that patches fit into."""

# C colour channels, H rows, W columns

from __future__ import annotations

import math
import stat
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from data_prep.refusals import PrepError, Reason, RefusedError

# Named, so that no stub, document or video reader of Pillow runs on a stranger's file.
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "TGA", "TIFF")
FORMATS += ("WEBP",)


@cache
def readable_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this build of Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def image_endings() -> frozenset[str]:
    """Lower-case file endings of the readable formats, with the dot."""
    known = (*readable_formats(), "MPO")  # several JPEGs in one, which the JPEG reader opens
    registered = Image.registered_extensions().items()
    return frozenset(ending for ending, name in registered if name in known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How a picture is brought to a size that is packed; its sides are never stretched apart."""

    size_multiple: int
    """Pixels; each side is cropped to a multiple of this."""
    max_pixels: int | None
    """Larger pictures are scaled down to at most this many pixels; None keeps all."""

    def __post_init__(self) -> None:
        if self.size_multiple < 1:
            raise PrepError(f"--size_multiple {self.size_multiple} must be at least 1 pixel")
        if self.max_pixels is not None and self.max_pixels < self.size_multiple**2:
            raise PrepError(
                f"--max_pixels {self.max_pixels} is less than one patch of"
                f" {self.size_multiple} x {self.size_multiple} pixels; raise it"
            )

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Size with the same ratio and at most `max_pixels` pixels, in whole numbers throughout."""
        if self.max_pixels is None or width * height <= self.max_pixels:
            return width, height
        # floor(sqrt(P w / h)): a product of floats falls one short where the root is whole.
        budget = self.max_pixels
        return math.isqrt(budget * width // height), math.isqrt(budget * height // width)

    def cropped(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, upper, right, lower edge of the largest centred box that patches fill."""
        wide, high = (side - side % self.size_multiple for side in (width, height))
        left, upper = (width - wide) // 2, (height - high) // 2
        return left, upper, left + wide, upper + high

    def apply(self, image: Image.Image) -> Image.Image:
        """The scaled and cropped picture.

        Raises:
            RefusedError: a side is shorter than `size_multiple`.
        """
        size = self.scaled(*image.size)
        if min(size) < self.size_multiple:
            shrunk = "" if size == image.size else f" (scaled from {image.width} x {image.height})"
            raise RefusedError(
                Reason.TOO_SMALL,
                f"{size[0]} x {size[1]} pixels{shrunk}, less than {self.size_multiple}",
            )
        if size != image.size:
            image = image.resize(size, Image.Resampling.LANCZOS)
        return image.crop(self.cropped(*size))


class Opened(NamedTuple):
    """The first frame of a file, upright."""

    image: Image.Image
    is_animated: bool


def open_image(path: Path) -> Opened:
    """The first frame of an image file, decoded whole.

    Raises:
        RefusedError: it is empty, no image of `FORMATS`, damaged, cut short or suspiciously large.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block for ever
            raise RefusedError(Reason.UNREADABLE, "it is no regular file")
        if status.st_size == 0:
            raise RefusedError(Reason.EMPTY, "0 bytes")
        path.open("rb").close()
    except OSError as error:
        raise RefusedError(Reason.UNREADABLE, error.strerror or str(error)) from error
    try:
        return _decode(path)
    except UnidentifiedImageError as error:
        raise RefusedError(
            Reason.NO_IMAGE, "its first bytes belong to none, or end too early"
        ) from error
    except Image.DecompressionBombError as error:
        raise RefusedError(Reason.TOO_LARGE, str(error)) from error
    except Exception as error:  # Pillow raises whatever the damage provokes
        raise RefusedError(Reason.DAMAGED, f"{type(error).__name__}: {error}") from error


def _decode(path: Path) -> Opened:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Image.open(path, formats=readable_formats()) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            # A telephone's MPO holds further views of the same picture.
            is_animated = image.format != "MPO" and getattr(image, "is_animated", False)
            is_tiff = image.format == "TIFF"
    # A TIFF that was cut short only warns; in other formats the warning is about EXIF alone.
    cut = [str(w.message) for w in warned if "Truncated File Read" in str(w.message)]
    if is_tiff and cut:
        raise OSError(cut[0])
    return Opened(upright, is_animated)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode of Pillow to RGB; transparent parts show white.

    Raises:
        RefusedError: numbers of a range nobody knows, or a mode that has no way to RGB.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = _from_numbers(image)
    try:
        if image.has_transparency_data:
            paper = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(paper, image.convert("RGBA"))
        return image.convert("RGB")
    except ValueError as error:
        raise RefusedError(Reason.PIXELS, f"mode {image.mode}: {error}") from error


def _from_numbers(image: Image.Image) -> Image.Image:
    """Grey of 16-bit integers (0 to 65535) or of floats (0 to 1) to 8 bits."""
    numbers_HW = np.asarray(image).astype(np.float64)
    white = 1.0 if image.mode == "F" else 65535.0
    low, high = numbers_HW.min(), numbers_HW.max()
    if not (low >= 0 and high <= white):  # catches NaN as well
        raise RefusedError(
            Reason.PIXELS, f"mode {image.mode} from {low:g} to {high:g}, not within 0 to {white:g}"
        )
    return Image.fromarray(np.rint(numbers_HW * (255 / white)).astype(np.uint8))


def to_video(image: Image.Image, *, colours: int) -> Tensor:
    """RGB picture to [colours, 1, H, W] float32 in [-1, 1]."""
    image = image if colours == 3 else image.convert("L")
    levels_HWC = np.array(image).reshape(image.height, image.width, colours)
    return torch.from_numpy(levels_HWC).permute(2, 0, 1)[:, None].float() / 127.5 - 1
