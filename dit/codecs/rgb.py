"""Converts pictures in any mode of Pillow to 8-bit RGB, and computes how they are cropped.

Data preparation and generation share these functions.
"""

# H rows, W columns

from __future__ import annotations

import io
import math
import re
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageFile, ImageOps

from dit.codecs.icc_profiles import transformed, transformed_numbers
from dit.codecs.picture_colours import from_start, told_colours

WHITE = "white"
_BITS = {"1": 1, "L;2": 2, "L;4": 4}
"""Bits of a grey level in a PNG, by Pillow's name of the layout; Pillow scales levels to 8 bits."""


class ReferenceFit(StrEnum):
    """Rules for the size of an encoded reference picture."""

    OWN = "own"  # its own size in whole patches; data_prep also limits it to the pixel budget
    TARGET = "target"  # the size of its target; data_prep scales it to cover this and crops it
    PUBLISHED = "published"  # the size to which the pipeline of the published weights scales it


class Placement(NamedTuple):
    """How a picture is cropped: it is scaled to `resized`, then cropped centrally to `size`.

    Both are (width, height) in pixels.
    """

    resized: tuple[int, int]
    size: tuple[int, int]

    @property
    def lost(self) -> float:
        """The fraction of the scaled picture's area that the crop removes."""
        return 1 - math.prod(self.size) / math.prod(self.resized)

    def apply(
        self, image: Image.Image, mode: Image.Resampling = Image.Resampling.LANCZOS
    ) -> Image.Image:
        """`image` scaled to `resized` by `mode`, then cropped to `size`."""
        if self.resized != image.size:
            image = image.resize(self.resized, mode)
        left, upper = ((a - b) // 2 for a, b in zip(self.resized, self.size, strict=True))
        return image.crop((left, upper, left + self.size[0], upper + self.size[1]))


def cover(width: int, height: int, size: tuple[int, int]) -> tuple[int, int]:
    """The smallest size that covers `size` and has nearly the aspect of `width` and `height`.

    Sizes are (width, height) in pixels.
    """
    wide, high = size
    if wide * height >= high * width:
        return wide, max(high, (2 * wide * height + width) // (2 * width))
    return max(wide, (2 * high * width + height) // (2 * height)), high


def colour(text: str) -> str:
    """The opaque colour that `text` names or gives by numbers, as `#rrggbb`, or `white` for white.

    Raises:
        ValueError: `text` is no opaque colour, or has levels (also in hsl and hsv) that no pixel
            can have.
    """
    levels = ImageColor.getrgb(text)
    if not all(0 <= level <= 255 for level in levels):  # Pillow takes rgb(300,0,0)
        raise ValueError(f"{text} has levels outside of 0 to 255; give a colour as #rrggbb")
    if levels[3:] not in ((), (255,)):
        raise ValueError(f"{text} is not opaque; give a colour without alpha, as #rrggbb")
    name = "#{:02x}{:02x}{:02x}".format(*levels)
    return WHITE if name == "#ffffff" else name


def upright(opened: ImageFile.ImageFile) -> Image.Image:
    """Decodes the opened picture, and rotates and mirrors it as its EXIF says.

    The colours are not converted yet: `info["icc_profile"]` holds the profile that `told_colours`
    found (none for sRGB), and `to_rgb` applies it. Only 16-bit RGB with a profile is converted to
    sRGB at once. An alpha channel of a TGA that is 0 everywhere is dropped.
    """
    bits = _BITS.get(_raw_mode(opened.tile[0])) if opened.format == "PNG" and opened.tile else None
    profile = told_colours(opened).profile
    low = _low_bytes(opened) if profile else None
    opened.load()
    opened.info.pop("icc_profile", None)
    if profile:
        opened.info["icc_profile"] = profile
    level = opened.info.get("transparency")
    if bits and level is not None:  # Pillow leaves the transparent grey in the bits of the file
        opened.info["transparency"] = min(255, level * (255 // (2**bits - 1)))
    image = ImageOps.exif_transpose(opened)
    if profile and low is not None:
        return _from_16_bits(image, ImageOps.exif_transpose(low), profile)
    # The fourth byte of a TGA is often unused, and then 0.
    is_unused = opened.format == "TGA" and image.mode == "RGBA" and not _alpha(image).any()
    return image.convert("RGB") if is_unused else image


def to_rgb(image: Image.Image, background: str = WHITE) -> Image.Image:
    """Converts `image`, of any mode, to sRGB in mode RGB, on `background` where it is transparent.

    Raises:
        ValueError: its pixel values have an unknown range, or its mode cannot be converted to RGB.
    """
    coloured = _with_transparency(image)
    if coloured.mode == "RGB":
        return coloured
    paper = Image.new("RGBA", image.size, background)
    return Image.alpha_composite(paper, coloured).convert("RGB")


def to_rgba(image: Image.Image) -> Image.Image:
    """Converts `image`, of any mode, to sRGB in mode RGBA; it is opaque if it has no transparency.

    Raises:
        ValueError: its pixel values have an unknown range, or its mode cannot be converted to RGB.
    """
    return _with_transparency(image).convert("RGBA")


def on_white(levels_FHW4: np.ndarray) -> np.ndarray:
    """RGBA frames, uint8 [F, H, W, 4], on white, as RGB [F, H, W, 3]; RGB frames are unchanged."""
    if levels_FHW4.shape[-1] != 4:
        return levels_FHW4
    clear, alpha = levels_FHW4[..., :3].astype(np.float32), levels_FHW4[..., 3:] / np.float32(255)
    return np.rint(255 + alpha * (clear - 255)).astype(np.uint8)


def _with_transparency(image: Image.Image) -> Image.Image:
    """`image` in sRGB: RGBA if its mode has transparency, else RGB.

    Raises:
        ValueError: its pixel values have an unknown range, or its mode cannot be converted to RGB.
    """
    is_wide, profile = _is_wide(image), image.info.get("icc_profile")
    image = _from_numbers(image, profile) if is_wide else image
    try:
        if not image.has_transparency_data:
            return _in_srgb(image).convert("RGB")
        clear = _with_alpha(image)
        # A profile is of the colours alone, and that of a grey picture is of grey.
        opaque = image.getchannel("L") if image.mode == "LA" else clear.convert("RGB")
        coloured = _in_srgb(opaque).convert("RGB")
        coloured.putalpha(clear.getchannel("A"))
        return coloured
    except ValueError as error:
        raise ValueError(
            f"a picture of mode {image.mode} cannot be converted to RGB ({error}); save it as 8-bit"
            " sRGB"
        ) from error


def is_transparent(image: Image.Image) -> bool:
    """Whether any pixel of `image` is transparent, even slightly."""
    if not image.has_transparency_data:
        return False
    return bool(_alpha(_with_alpha(to_8_bits(image))).min() < 255)


def _alpha(image: Image.Image) -> np.ndarray:
    return np.asarray(image.getchannel("A"))


def _with_alpha(image: Image.Image) -> Image.Image:
    """The picture as RGBA; premultiplied colours are divided by alpha."""
    divided = image.convert("LA") if image.mode == "La" else image
    return divided.convert("RGBA")


def _in_srgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    return transformed(image, profile) if profile else image


def to_8_bits(image: Image.Image) -> Image.Image:
    """`image` with 8 bits per channel: 16-bit and float greys are converted, others are returned.

    Raises:
        ValueError: 16-bit or float greys are not within 0 to 65535 or 0 to 1.
    """
    return _from_numbers(image) if _is_wide(image) else image


def _is_wide(image: Image.Image) -> bool:
    return image.mode == "F" or image.mode.startswith("I")


def _from_numbers(image: Image.Image, profile: bytes | None = None) -> Image.Image:
    """Converts a picture of 16-bit integers (0 to 65535) or floats (0 to 1) to 8 bits per channel.

    The result is grey; if a `profile` is given, it is sRGB. A transparent grey in `info` becomes an
    alpha channel.

    Raises:
        ValueError: a number is outside that range.
    """
    numbers_HW = np.asarray(image).astype(np.float64)
    white = 1.0 if image.mode == "F" else 65535.0
    low, high = numbers_HW.min(), numbers_HW.max()
    if not (low >= 0 and high <= white):  # catches NaN as well
        raise ValueError(
            f"a picture of mode {image.mode} has values from {low:g} to {high:g}; scale them to 0"
            f" to {white:g}"
        )
    levels_HW = numbers_HW * (255 / white)
    bytes_HW = transformed_numbers(levels_HW, profile) if profile else np.rint(levels_HW)
    made = Image.fromarray(bytes_HW.astype(np.uint8))
    if (level := image.info.get("transparency")) is not None:
        made.putalpha(Image.fromarray(255 * (numbers_HW != level).astype(np.uint8)))
    return made


def _low_bytes(opened: ImageFile.ImageFile) -> Image.Image | None:
    """The low bytes of 16-bit RGB, of which Pillow decodes only the high ones.

    The result is None for other files. To read the low bytes, Pillow gets the opposite byte order.
    """
    is_fine = all(re.fullmatch("RGB[AX]?;16[BLN]", _raw_mode(tile)) for tile in opened.tile)
    if not opened.tile or not is_fine:
        return None
    content = from_start(opened, lambda stream: stream.read())
    low = Image.open(io.BytesIO(content), formats=[str(opened.format)])
    tiles: list[Any] = low.tile
    for number, (codec, box, offset, args) in enumerate(tiles):
        kind, order = _raw_mode(tiles[number]).split(";16")
        swapped = f"{kind};16{'L' if order == 'B' else 'B'}"
        args = swapped if isinstance(args, str) else (swapped, *args[1:])
        tiles[number] = (codec, box, offset, args)
    low.load()
    return low


def _raw_mode(tile: Any) -> str:
    """Pillow's name for the layout of pixels in a tile of the file."""
    return tile[3] if isinstance(tile[3], str) else str((tile[3] or ("",))[0])


def _from_16_bits(high: Image.Image, low: Image.Image, profile: bytes) -> Image.Image:
    """The sRGB picture of 16-bit colours, given by their high and low bytes.

    Transparency, if there is any, is taken from `high`.
    """
    high_HW3, low_HW3 = (np.asarray(image)[..., :3].astype(np.float32) for image in (high, low))
    levels_HW3 = (high_HW3 * 256 + low_HW3) / 257
    made = Image.fromarray(transformed_numbers(levels_HW3, profile))
    if high.has_transparency_data:
        made.putalpha(_with_alpha(high).getchannel("A"))
    return made
