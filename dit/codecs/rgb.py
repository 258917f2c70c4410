"""A picture of any mode of Pillow -> 8-bit RGB, alike for data preparation and generation."""

# H rows, W columns

from __future__ import annotations

import io
from functools import cache

import numpy as np
from PIL import Image, ImageCms


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as sRGB, on white where it is transparent.

    Raises:
        ValueError: numbers of an unknown range, or a mode that cannot be converted to RGB.
    """
    image = _in_srgb(to_8_bits(image))
    try:
        if image.has_transparency_data:
            paper = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(paper, image.convert("RGBA"))
        return image.convert("RGB")
    except ValueError as error:
        raise ValueError(f"mode {image.mode}: {error}") from error


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
        if image.mode in ("P", "PA", "LA"):
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        mode = "RGBA" if image.mode == "RGBA" else "RGB"
        return ImageCms.profileToProfile(image, profile, _srgb(), outputMode=mode) or image
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
    return Image.fromarray(np.rint(numbers_HW * (255 / white)).astype(np.uint8))
