"""Converts colours to sRGB by ICC profiles, with Little CMS.

1. `coded_profile`, `gamma_profile`  colour codes (ITU-T H.273) or gamma -> ICC profile
2. `fits`, `is_srgb`  whether a profile applies to a picture, and changes it
3. `transformed`, `transformed_numbers`  bytes, or finer numbers -> sRGB
"""

# H rows, W columns, C colour channels

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageCms

SRGB, UNSPECIFIED = 13, 2
"""Codes of the transfer of sRGB, and of "unspecified" (also for primaries; ITU-T H.273)."""
HDR = frozenset((16, 18))
"""Codes of the transfers PQ and HLG (ITU-T H.273, table 3)."""
TELEVISION = frozenset((1, 6, 14, 15))
"""Codes of transfers with the curve of BT.709."""
_D65, _C = (0.3127, 0.329), (0.31, 0.316)
_SMPTE = (0.63, 0.34, 0.31, 0.595, 0.155, 0.07, *_D65)
_P3 = (0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
BT709 = (0.64, 0.33, 0.3, 0.6, 0.15, 0.06, *_D65)
"""x and y of red, green, blue and white of BT.709, the primaries of sRGB."""
_PRIMARIES = {  # ITU-T H.273, table 2
    1: BT709,
    4: (0.67, 0.33, 0.21, 0.71, 0.14, 0.08, *_C),
    5: (0.64, 0.33, 0.29, 0.6, 0.15, 0.06, *_D65),
    6: _SMPTE,
    7: _SMPTE,
    8: (0.681, 0.319, 0.243, 0.692, 0.145, 0.049, *_C),
    9: (0.708, 0.292, 0.17, 0.797, 0.131, 0.046, *_D65),  # BT.2020
    10: (1, 0, 0, 1, 0, 0, 1 / 3, 1 / 3),  # XYZ
    11: (*_P3, 0.314, 0.351),
    12: (*_P3, *_D65),  # Display P3
    22: (0.63, 0.34, 0.295, 0.605, 0.155, 0.077, *_D65),
}
_BT1886 = 2.4
_POWERS = {4: 2.2, 5: 2.8, 8: 1.0} | dict.fromkeys(TELEVISION, _BT1886)
_LEVELS = np.linspace(0, 1, 256)
_CURVES: dict[int, np.ndarray] = {  # ITU-T H.273, table 3: light of each 8-bit level
    7: np.where(_LEVELS < 0.0912, _LEVELS / 4, ((_LEVELS + 0.1115) / 1.1115) ** (1 / 0.45)),
    SRGB: np.where(_LEVELS <= 0.04045, _LEVELS / 12.92, ((_LEVELS + 0.055) / 1.055) ** 2.4),
    17: np.minimum(1, 52.37 / 48 * _LEVELS**2.6),
} | {number: _LEVELS**power for number, power in _POWERS.items()}
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
_D50 = np.array([0.9642, 1.0, 0.8249])  # of ICC's connection space
_BAND = 64  # rows at once, which bounds the memory
_MODES = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}
_GREYS = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"))
_FITTING = {  # mode that a profile is of -> modes of pictures to which it applies
    "RGB": _GREYS | {"RGB", "RGBA", "RGBX", "RGBa", "P", "PA", "YCbCr"},
    "L": _GREYS,
    "CMYK": frozenset(("CMYK",)),
}


def coded_profile(primaries: int, transfer: int) -> bytes | None:
    """The ICC profile of H.273's codes `primaries` and `transfer`; None if a code is unknown.

    The curves are those of displays: BT.709 is shown with the gamma of BT.1886, 2.4.
    """
    if primaries not in _PRIMARIES or transfer not in _CURVES:
        return None
    return _matrix_profile(_PRIMARIES[primaries], _CURVES[transfer])


def gamma_profile(xy: Sequence[float], exponent: float) -> bytes:
    """The ICC profile of a display whose light is the level to the power of `exponent`.

    `xy` are the chromaticities (x, y) of red, green, blue and white, in this order.

    Raises:
        ValueError: `xy` cannot be primaries.
    """
    return _matrix_profile(xy, _LEVELS**exponent)


def coded_of(profile: bytes) -> tuple[int, int] | None:
    """The H.273 codes (primaries, transfer) in a profile's tag `cicp`; None without this tag."""
    (count,) = struct.unpack(">I", profile[128:132].rjust(4, b"\0"))
    for at in range(132, min(132 + 12 * count, len(profile) - 11), 12):
        name, place, _ = struct.unpack(">4sII", profile[at : at + 12])
        if name == b"cicp" and len(content := profile[place : place + 12]) == 12:
            return content[8], content[9]
    return None


def _matrix_profile(xy: Sequence[float], light: np.ndarray) -> bytes:
    """An ICC profile (ICC.1:2022) of RGB with primaries `xy` and a curve for each channel.

    `light` is the linear light, 0 to 1, of each of the 256 levels.

    Raises:
        ValueError: `xy` cannot be primaries.
    """
    try:
        columns = _adapted_columns(np.reshape(xy, (4, 2)))
    except np.linalg.LinAlgError as error:
        raise ValueError(
            f"the chromaticities {xy} cannot be those of three primaries and white"
        ) from error
    curve = b"curv\0\0\0\0" + struct.pack(">I256H", 256, *np.rint(65535 * light).astype(int))
    tags = dict[bytes, bytes]()
    for letter, column in zip((b"r", b"g", b"b"), columns.T, strict=True):
        tags[letter + b"XYZ"] = b"XYZ \0\0\0\0" + _fixed(column)
        tags[letter + b"TRC"] = curve
    at, table = 132 + 12 * len(tags), struct.pack(">I", len(tags))
    for name, content in tags.items():
        table += struct.pack(">4sII", name, at, len(content))
        at += len(content)
    head = struct.pack(">I4xI4s4s4s12x4s", at, 0x04000000, b"mntr", b"RGB ", b"XYZ ", b"acsp")
    head = head.ljust(68, b"\0") + _fixed(_D50)
    return head.ljust(128, b"\0") + table + b"".join(tags.values())


def _adapted_columns(xy_42: np.ndarray) -> np.ndarray:
    """XYZ of red, green and blue light, the columns of a matrix [3, 3], adapted to D50.

    `xy_42` are the chromaticities of red, green, blue and white; the columns add up to white.

    Raises:
        np.linalg.LinAlgError: `xy_42` cannot be primaries.
    """
    directions_34 = np.column_stack([xy_42, 1 - xy_42.sum(1)]).T
    if not xy_42[3, 1] > 0:
        raise np.linalg.LinAlgError
    white_3 = directions_34[:, 3] / xy_42[3, 1]
    columns_33 = directions_34[:, :3] * np.linalg.solve(directions_34[:, :3], white_3)
    cones_3 = (_BRADFORD @ _D50) / (_BRADFORD @ white_3)
    columns_33 = np.linalg.solve(_BRADFORD, cones_3[:, None] * (_BRADFORD @ columns_33))
    if not np.abs(columns_33).max() < 2**15:
        raise np.linalg.LinAlgError
    return columns_33


def _fixed(numbers: np.ndarray) -> bytes:
    return np.rint(numbers * 65536).astype(">i4").tobytes()


def fits(profile: bytes, mode: str) -> bool:
    """Whether `profile` applies to pictures of `mode`, and is not damaged."""
    if mode not in _FITTING.get(_MODES.get(profile[16:20], ""), ()):
        return False
    try:
        _transform(profile)
    except ValueError:
        return False
    return True


def is_srgb(profile: bytes) -> bool:
    """Whether `profile` moves no tested colour by more than one of 255 levels; False for CMYK.

    The tested colours are all greys and, for RGB, 729 others. A comparison of bytes would not do,
    because profiles of sRGB differ by rounding; nor do names: GIMP's profile of linear light is
    called "GIMP built-in Linear sRGB".

    Raises:
        ValueError: the profile cannot be read.
    """
    return _transform(profile) is None


@lru_cache(maxsize=64)
def _transform(profile: bytes) -> ImageCms.ImageCmsTransform | None:
    """The transform from `profile` to sRGB; None if `profile` is sRGB.

    Raises:
        ValueError: the profile cannot be read.
    """
    mode = _MODES[profile[16:20]]
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        # Between 33 greys Little CMS would interpolate: linear light is 10 levels off then.
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE
        found = ImageCms.buildTransform(opened, _srgb(), mode, "RGB", flags=flags)
        return found if _moves(found, mode) else None
    except (ImageCms.PyCMSError, OSError) as error:
        raise ValueError(
            f"its colour profile cannot be read ({error}); save the picture as sRGB"
        ) from error


@cache
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


@cache
def _probe(mode: str) -> Image.Image:
    """A picture to test a transform: all 256 greys, and for mode RGB also 729 colours."""
    greys_1W = np.arange(256, dtype=np.uint8)[None]
    if mode == "L":
        return Image.fromarray(greys_1W)
    some = np.linspace(0, 255, 9).astype(np.uint8)
    colours_1W3 = np.stack(np.meshgrid(some, some, some), axis=-1).reshape(1, -1, 3)
    return Image.fromarray(np.hstack([np.repeat(greys_1W[..., None], 3, axis=2), colours_1W3]))


def _moves(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Whether `transform` changes a colour by more than one level; always true for CMYK."""
    if mode == "CMYK":
        return True
    before = _probe(mode)
    pair = (
        np.asarray(one.convert("RGB")).astype(int) for one in (before, _applied(transform, before))
    )
    return bool(np.abs(np.subtract(*pair)).max() > 1)


def transformed(image: Image.Image, profile: bytes) -> Image.Image:
    """The opaque picture `image` converted from the colours of `profile` to sRGB.

    If `profile` is sRGB, `image` itself is returned.

    Raises:
        ValueError: the profile cannot be read.
    """
    mode, found = _MODES[profile[16:20]], _transform(profile)
    if found is None:
        return image
    image = image if image.mode == mode else image.convert(mode)
    if mode == "L":
        shades = _applied(found, _probe("L")).split()
        return Image.merge("RGB", [image.point(list(shade.tobytes())) for shade in shades])
    return _applied(found, image)


def _applied(transform: ImageCms.ImageCmsTransform, image: Image.Image) -> Image.Image:
    made = ImageCms.applyTransform(image, transform)
    assert made is not None, "only a transform in place has no result"
    return made


def transformed_numbers(levels: np.ndarray, profile: bytes) -> np.ndarray:
    """Converts `levels`, fractional numbers in [0, 255], from `profile` to uint8 sRGB [H, W, 3].

    `levels` are grey [H, W] or RGB [H, W, 3]. Little CMS converts bytes, and colours between two
    bytes are interpolated: if levels were rounded first, several dark levels of linear light would
    become one.

    Raises:
        ValueError: the profile cannot be read.
    """
    bands = range(0, len(levels), _BAND)
    return np.concatenate([_band(levels[row : row + _BAND], profile) for row in bands])


def _band(levels: np.ndarray, profile: bytes) -> np.ndarray:
    below = np.floor(levels)
    rest, base_HW3 = levels - below, _of_bytes(below, profile)
    made_HW3 = base_HW3.copy()
    if levels.ndim == 2:
        step_HW3 = _of_bytes(np.minimum(below + 1, 255), profile) - base_HW3
        return np.rint(made_HW3 + rest[..., None] * step_HW3).astype(np.uint8)
    for channel in np.eye(3, dtype=np.float32):
        step_HW3 = _of_bytes(np.minimum(below + channel, 255), profile) - base_HW3
        made_HW3 += (rest @ channel)[..., None] * step_HW3
    return np.rint(made_HW3).clip(0, 255).astype(np.uint8)


def _of_bytes(whole: np.ndarray, profile: bytes) -> np.ndarray:
    picture = transformed(Image.fromarray(whole.astype(np.uint8)), profile)
    return np.asarray(picture.convert("RGB")).astype(np.float32)
