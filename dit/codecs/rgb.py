"""A picture of any mode of Pillow -> 8-bit RGB, and sizes: alike in data_prep and generation."""

# H rows, W columns

from __future__ import annotations

import io
import math
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageColor, ImageFile, ImageOps

WHITE = "white"
_BITS = {"1": 1, "L;2": 2, "L;4": 4}
"""Bits of a grey level in a PNG file, by Pillow's name for such pixels; it scales them to 8."""


class ReferenceFit(StrEnum):
    """Size at which a reference picture is encoded."""

    OWN = "own"  # its own in whole patches, in packing within the pixel budget of the media
    TARGET = "target"  # that of its target; in packing scaled to cover it and cropped
    PUBLISHED = "published"  # what the pipeline of the published weights scales it to


class Placement(NamedTuple):
    """A picture is scaled to `resized` and cropped to its centre `size`; both (width, height)."""

    resized: tuple[int, int]
    size: tuple[int, int]

    @property
    def lost(self) -> float:
        """Part of the area of the picture that the crop takes away."""
        return 1 - math.prod(self.size) / math.prod(self.resized)

    def apply(
        self, image: Image.Image, mode: Image.Resampling = Image.Resampling.LANCZOS
    ) -> Image.Image:
        """The part of `image` that is encoded."""
        if self.resized != image.size:
            image = image.resize(self.resized, mode)
        left, upper = ((a - b) // 2 for a, b in zip(self.resized, self.size, strict=True))
        return image.crop((left, upper, left + self.size[0], upper + self.size[1]))


def cover(width: int, height: int, size: tuple[int, int]) -> tuple[int, int]:
    """The smallest size that covers `size`, with about the ratio `width` to `height`."""
    wide, high = size
    if wide * height >= high * width:
        return wide, max(high, (2 * wide * height + width) // (2 * width))
    return max(wide, (2 * high * width + height) // (2 * height)), high


def colour(text: str) -> str:
    """An opaque colour by its name or numbers, as `#rrggbb`; white is always `white`.

    Raises:
        ValueError: it is no such colour, or has levels (in hsl and hsv, too) that no pixel has.
    """
    levels = ImageColor.getrgb(text)
    if not all(0 <= level <= 255 for level in levels):  # Pillow takes rgb(300,0,0)
        raise ValueError(f"{text} has levels outside of 0 to 255")
    if levels[3:] not in ((), (255,)):
        raise ValueError(f"{text} is not opaque")
    name = "#{:02x}{:02x}{:02x}".format(*levels)
    return WHITE if name == "#ffffff" else name


def upright(opened: ImageFile.ImageFile) -> Image.Image:
    """All pixels of a picture that was just opened, turned and mirrored as its EXIF says."""
    bits = _BITS.get(str(opened.tile[0][3])) if opened.format == "PNG" and opened.tile else None
    opened.load()
    level = opened.info.get("transparency")
    if bits and level is not None:  # Pillow leaves the transparent grey in the bits of the file
        opened.info["transparency"] = min(255, level * (255 // (2**bits - 1)))
    image = ImageOps.exif_transpose(opened)
    # The fourth byte of a TGA is often unused, and then 0.
    is_unused = opened.format == "TGA" and image.mode == "RGBA" and not _alpha(image).any()
    return image.convert("RGB") if is_unused else image


def to_rgb(image: Image.Image, background: str = WHITE) -> Image.Image:
    """An image of any mode as sRGB, on `background` where it is transparent.

    Raises:
        ValueError: numbers of an unknown range, or a mode that cannot be converted to RGB.
    """
    image = to_8_bits(image)
    try:
        if not image.has_transparency_data:
            return _in_srgb(image).convert("RGB")
        clear = _with_alpha(image)
        # A profile is of the colours alone, and that of a grey picture is of grey.
        opaque = image.getchannel("L") if image.mode == "LA" else clear.convert("RGB")
        coloured = _in_srgb(opaque).convert("RGB")
        coloured.putalpha(clear.getchannel("A"))
        paper = Image.new("RGBA", image.size, background)
        return Image.alpha_composite(paper, coloured).convert("RGB")
    except ValueError as error:
        raise ValueError(f"mode {image.mode}: {error}") from error


def is_transparent(image: Image.Image) -> bool:
    """Whether any pixel of a picture that `to_rgb` takes is transparent, be it a little."""
    if not image.has_transparency_data:
        return False
    return bool(_alpha(_with_alpha(to_8_bits(image))).min() < 255)


def _alpha(image: Image.Image) -> np.ndarray:
    return np.asarray(image.getchannel("A"))


def _with_alpha(image: Image.Image) -> Image.Image:
    """RGBA; colours that are multiplied by the alpha channel are divided by it."""
    divided = image.convert("LA") if image.mode == "La" else image
    return divided.convert("RGBA")


def _in_srgb(image: Image.Image) -> Image.Image:
    """The same picture, or its colours in sRGB where its profile is of another colour space.

    Telephones write Display P3. A profile that does not fit the picture is ignored, as by browsers.
    """
    if not (content := image.info.get("icc_profile")):
        return image
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(content))
        if "srgb" in ImageCms.getProfileDescription(profile).lower():
            return image
        if image.mode == "P":
            image = image.convert("RGB")
        return ImageCms.profileToProfile(image, profile, _srgb(), outputMode="RGB") or image
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image


@cache
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def to_8_bits(image: Image.Image) -> Image.Image:
    """The same picture, or 8-bit grey of one with numbers that are no bytes.

    Raises:
        ValueError: numbers of an unknown range.
    """
    is_wide = image.mode == "F" or image.mode.startswith("I")
    return _from_numbers(image) if is_wide else image


def _from_numbers(image: Image.Image) -> Image.Image:
    """8-bit grey of 16-bit integers (0 to 65535) or of floats (0 to 1)."""
    numbers_HW = np.asarray(image).astype(np.float64)
    white = 1.0 if image.mode == "F" else 65535.0
    low, high = numbers_HW.min(), numbers_HW.max()
    if not (low >= 0 and high <= white):  # catches NaN as well
        raise ValueError(f"mode {image.mode} from {low:g} to {high:g}, not within 0 to {white:g}")
    grey = Image.fromarray(np.rint(numbers_HW * (255 / white)).astype(np.uint8))
    if (level := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(255 * (numbers_HW != level).astype(np.uint8)))
    return grey
