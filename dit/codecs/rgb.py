"""A picture of any mode of Pillow -> 8-bit RGB, alike for data preparation and generation."""

# H rows, W columns

from __future__ import annotations

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB, on white where it is transparent.

    Raises:
        ValueError: numbers of an unknown range, or a mode that cannot be converted to RGB.
    """
    image = to_8_bits(image)
    try:
        if image.has_transparency_data:
            paper = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(paper, image.convert("RGBA"))
        return image.convert("RGB")
    except ValueError as error:
        raise ValueError(f"mode {image.mode}: {error}") from error


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
