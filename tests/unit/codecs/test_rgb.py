"""Transparency of every form of picture: on a background in 8-bit RGB, in the colours of sRGB."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageCms

from dit.codecs.rgb import colour, is_transparent, to_rgb, upright
from tests.colour_files import png

WHITE, BLUE = (255, 255, 255), (0, 0, 255)


def tiff(bits: int, photometric: int, extra: int, row: list[tuple[int, ...]]) -> bytes:
    """A TIFF file (TIFF 6.0) of one row, whose last sample is alpha: 1 premultiplied, 2 not."""
    samples, width = len(row[0]), len(row)
    pixels = np.array(row, f"<u{bits // 8}").tobytes()
    each = struct.pack(f"<{samples}H", *[bits] * samples).ljust(4, b"\0")
    entries = 11
    behind = 8 + 2 + 12 * entries + 4
    at = behind + (len(each) if samples > 2 else 0)
    of_bits = struct.pack("<I", behind) if samples > 2 else each
    values = {256: width, 257: 1, 259: 1, 262: photometric, 277: samples, 278: 1, 284: 1}
    fields = {tag: struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in values.items()}
    fields[258] = struct.pack("<HHI", 258, 3, samples) + of_bits
    fields[273] = struct.pack("<HHII", 273, 4, 1, at)
    fields[279] = struct.pack("<HHII", 279, 4, 1, len(pixels))
    fields[338] = struct.pack("<HHIHH", 338, 3, 1, extra, 0)
    body = b"".join(content for _, content in sorted(fields.items())) + bytes(4)
    more = each if samples > 2 else b""
    return b"II*\0\x08\0\0\0" + struct.pack("<H", entries) + body + more + pixels


def opened(content: bytes) -> Image.Image:
    return upright(Image.open(io.BytesIO(content)))


def on(background: str, content: bytes) -> list[tuple[int, ...]]:
    """The colours of its row."""
    return [tuple(pixel) for pixel in np.asarray(to_rgb(opened(content), background))[0].tolist()]


def grey(bits: int, clear: int) -> bytes:
    """Black, white, and two levels between them, one of which is transparent, or black or white."""
    most = 2**bits - 1
    row = [(0,), (most,), (most // 3,), (most // 3 * 2,)]
    return png(0, bits, row, struct.pack(">H", clear))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_transparent_grey_of_any_depth(bits: int) -> None:
    most = 2**bits - 1
    levels = [0, most, most // 3, most // 3 * 2]
    for clear in set(levels):
        wanted = [BLUE if level == clear else (level * 255 // most,) * 3 for level in levels]
        assert on("blue", grey(bits, clear)) == wanted
        assert is_transparent(opened(grey(bits, clear)))


def premultiplied(bits: int) -> bytes:
    most, half = 2**bits - 1, 2 ** (bits - 1)
    row = [(most, 0, 0, most), (0, 0, 0, 0), (half, 0, 0, half)]
    return tiff(bits, 2, 1, row)


HALF_RED = (255, 127, 127)
FORMS = {  # content -> its colours on white; the last but one is hidden, the last is half there
    "grey alpha 8": (png(4, 8, [(0, 255), (9, 0), (0, 128)]), [(0,) * 3, WHITE, (127,) * 3]),
    "grey alpha 16": (
        png(4, 16, [(0, 65535), (9, 0), (0, 32768)]), [(0,) * 3, WHITE, (127,) * 3]
    ),
    "RGBA 8": (png(6, 8, [(255, 0, 0, 255), (0, 9, 0, 0), (255, 0, 0, 128)]), None),
    "RGBA 16": (png(6, 16, [(65535, 0, 0, 65535), (0, 9, 0, 0), (65535, 0, 0, 32768)]), None),
    "palette": (
        png(3, 8, [(0,), (1,), (2,)], b"\xff\0\x80", bytes((255, 0, 0, 0, 9, 0, 255, 0, 0))), None
    ),
    "palette 2": (
        png(3, 2, [(0,), (1,), (2,)], b"\xff\0\x80", bytes((255, 0, 0, 0, 9, 0, 255, 0, 0))), None
    ),
    "RGB": (
        png(2, 8, [(255, 0, 0), (0, 9, 0)], struct.pack(">3H", 0, 9, 0)), [(255, 0, 0), WHITE]
    ),
    "RGB 16": (
        png(2, 16, [(65535, 0, 0), (0, 65535, 0)], struct.pack(">3H", 0, 65535, 0)),
        [(255, 0, 0), WHITE],
    ),
    "TIFF": (tiff(8, 2, 2, [(255, 0, 0, 255), (0, 9, 0, 0), (255, 0, 0, 128)]), None),
    "TIFF 16": (
        tiff(16, 2, 2, [(65535, 0, 0, 65535), (0, 9, 0, 0), (65535, 0, 0, 32768)]), None
    ),
    "TIFF premultiplied": (premultiplied(8), None),
    "TIFF premultiplied 16": (premultiplied(16), None),
    "TIFF grey": (tiff(8, 1, 2, [(0, 255), (9, 0), (0, 128)]), [(0,) * 3, WHITE, (127,) * 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_what_is_transparent_is_on_the_background(name: str) -> None:
    content, wanted = FORMS[name]
    wanted = wanted or [(255, 0, 0), WHITE, HALF_RED]
    assert np.abs(np.subtract(on("white", content), wanted)).max() <= 1
    on_black = on("#000000", content)
    assert on_black[:2] == [wanted[0], (0, 0, 0)]
    assert is_transparent(opened(content))


def test_premultiplied_grey_is_divided_by_its_alpha() -> None:
    """Pillow before 12 refuses such files."""
    try:
        image = opened(tiff(8, 1, 1, [(0, 255), (0, 0), (128, 128)]))
    except OSError as error:
        pytest.skip(str(error))
    found = np.asarray(to_rgb(image, "black"))[0, :, 0].tolist()
    assert found == [0, 0, 128] and np.asarray(to_rgb(image))[0, :, 0].tolist() == [0, 255, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_an_opaque_alpha_channel_is_no_transparency(mode: str) -> None:
    image = Image.new("RGB", (4, 4), (10, 20, 30)).convert(mode)
    assert not is_transparent(image)
    assert to_rgb(image, "red").tobytes() == image.convert("RGB").tobytes()


def test_an_unused_fourth_byte_of_a_tga_is_no_transparency() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(file, "TGA")
    assert on("white", file.getvalue()) == [(10, 20, 30)] * 4


def test_profiles_are_of_colours_alone() -> None:
    """A transparent colour is found before colours change, and alpha is never converted."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace("sRGB".encode("utf-16-be"), "GRB.".encode("utf-16-be"))
    for name, other in ((b"rXYZ", b"____"), (b"gXYZ", b"rXYZ"), (b"____", b"gXYZ")):
        swapped = swapped.replace(name, other)  # red and green change places
    image = Image.new("RGB", (2, 1), (200, 10, 30))
    image.putpixel((1, 0), (0, 0, 0))
    clear = image.convert("RGBA")
    clear.putpixel((1, 0), (0, 0, 0, 0))
    for picture, options in ((image, {"transparency": (0, 0, 0)}), (clear, {})):
        picture.save(file := io.BytesIO(), "png", icc_profile=swapped, **options)
        first, second = on("white", file.getvalue())
        assert np.abs(np.subtract(first, (10, 200, 30))).max() <= 2 and second == WHITE


def test_colours_by_name() -> None:
    assert [colour(text) for text in ("white", "#FFF", "rgb(255,255,255)")] == ["white"] * 3
    assert colour("Black") == "#000000" and colour("#ff8800ff") == "#ff8800"
    assert colour("hsl(720,100%,50%)") == "#ff0000" and colour("hsv(0,0%,100%)") == "white"
    beyond = ("rgb(300,0,0)", "rgb(150%,0%,0%)", "hsl(0,300%,50%)", "hsv(0,0%,120%)")
    for wrong in ("reddish", "#12345", "#ff880080", "", *beyond):
        with pytest.raises(ValueError):
            colour(wrong)
