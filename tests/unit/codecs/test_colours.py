"""A picture of any codec, however it tells its colours, is sRGB as a browser shows it.

`colours_of_chromium.json` has what Chromium reads from a canvas, which was white. Written anew by
`UPDATE_GOLDEN=1 python -m pytest -n0 tests/unit/codecs/test_colours.py` where one is installed.
"""

from __future__ import annotations

import base64
import io
import json
import os
import struct
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from dit.codecs import icc_profiles
from dit.codecs.picture_colours import told_colours
from dit.codecs.rgb import to_rgb, upright
from tests import colour_files
from tests.browser import browser
from tests.colour_files import (
    FILES,
    GREY,
    INKS,
    LINEAR,
    P3,
    PATCHES,
    PROFILES,
    SIDE,
    bmp,
    iccp,
    jpeg2000,
    light,
    png,
    saved,
    tiff_of_16_bits,
)

STORED = Path(__file__).with_name("colours_of_chromium.json")
# Two levels for rounding: Little CMS computes with bytes here, and the decoders of JPEG and AVIF of
# another build may differ by one before. The largest difference was 1.
LEVELS = 2
# Little CMS is right here: Chromium interpolates tables of inks, and clips them, in another way.
OF_INKS = {"jpeg CMYK ICC of inks": 12}
READ = """(async () => {
  const bytes = Uint8Array.from(atob("%s"), one => one.charCodeAt(0));
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([bytes], {type: "image/%s"}));
  try { await image.decode(); } catch (error) { return null; }
  const canvas = document.createElement("canvas");
  const width = canvas.width = image.width, height = canvas.height = image.height;
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(image, 0, 0);
  const levels = context.getImageData(0, 0, width, height).data, found = [];
  for (let x = SIDE / 2; x < width; x += SIDE) {
    const at = 4 * (Math.floor(height / 2) * width + x);
    found.push([...levels.slice(at, at + 3)]);
  }
  return found;
})()""".replace("SIDE", str(SIDE))


def opened(content: bytes) -> Any:
    return Image.open(io.BytesIO(content))


def patches(content: bytes) -> np.ndarray:
    """Levels of the patches [8, 3]."""
    pixels_HW3 = np.asarray(to_rgb(upright(opened(content))))
    return pixels_HW3[len(pixels_HW3) // 2, SIDE // 2 :: SIDE].astype(int)


def flaw(content: bytes) -> str:
    """The flaws that are counted, if there are any."""
    return "; ".join(told_colours(opened(content)).flaws)


@cache
def by_chromium() -> dict[str, Any]:
    return json.loads(STORED.read_text())["pixels"]


def gap(name: str) -> int:
    """The largest difference from what Chromium shows, or of HDR from what is stored."""
    content = FILES[name]()
    is_hdr = flaw(content).startswith("HDR picture")
    wanted = PATCHES if is_hdr else by_chromium()[name]
    if wanted is None:  # it shows nothing
        assert flaw(content), name
        return 0
    return int(np.abs(patches(content) - wanted).max())


@pytest.mark.skipif(not os.environ.get("UPDATE_GOLDEN"), reason="it writes the golden pixels")
def test_written_anew_by_chromium(tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        version = tab.call("Browser.getVersion")["product"]
        found = {
            name: tab.run(READ % (base64.b64encode(made()).decode(), name.split()[0]))
            for name, made in FILES.items()
        }
    head = f'{{"browser": "{version}", "date": "{date.today()}", "pixels": {{\n'
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    STORED.write_text(f"{head}{lines}\n}}}}\n")


@pytest.mark.parametrize("codec", sorted({name.split()[0] for name in FILES}))
def test_colours_are_those_of_chromium(codec: str) -> None:
    if codec in ("avif", "webp") and not features.check(codec):
        pytest.skip(f"this Pillow reads no {codec}")
    gaps = {name: gap(name) for name in FILES if name.startswith(codec)}
    assert gaps and not {n: g for n, g in gaps.items() if g > OF_INKS.get(n, LEVELS)}


FLAWS = {  # what is counted, by a part of its sentence; nothing of the other files is
    "HDR picture": (
        *("png cICP 9-16", "png cICP 9-18", "png cICP 12-16", "png cICP 1-18"),
        *("avif nclx 9-16", "avif nclx 9-18", "avif nclx 12-16", "avif nclx 1-18"),
        "avif header 9-16-6",
        *("png cICP 9-16, iCCP", "png iCCP numbers 9-16"),
        *("jpeg ICC numbers 9-16", "webp ICC numbers 9-16"),
    ),
    "profile that is damaged": (
        *("png iCCP cut short", "png iCCP of grey", "png iCCP of inks", "png iCCP cut short, gAMA"),
        *("png iCCP of grey, gAMA", "png iCCP cut short, sRGB", "png palette 8 iCCP of grey"),
        *("png RGB 8 iCCP of grey", "png RGB 16 iCCP of grey", "png RGBA 8 iCCP of grey"),
        *("png RGBA 16 iCCP of grey", "jpeg ICC cut short"),
        *("jpeg ICC of grey", "jpeg ICC of inks", "jpeg CMYK ICC P3", "webp ICC cut short"),
        *("webp ICC of grey", "webp ICC of inks"),
    ),
    "unknown way (cICP": (
        *("png cICP 1-2", "png cICP 12-2", "png cICP 2-13", "png cICP 2-8", "png cICP 0-0"),
        *("png cICP 3-13", "png cICP 99-13", "png cICP 12-99", "png cICP 1-9", "png cICP 1-10"),
        *("png cICP 1-12", "png cICP 12-13 of narrow range", "png cICP 12-13 of a matrix"),
        *("png cICP 12-99, iCCP", "png cICP of three bytes"),
    ),
    "unknown way (nclx": (
        *("avif nclx 0-0", "avif nclx 3-13", "avif nclx 99-13", "avif nclx 12-99"),
        *("avif nclx 1-9", "avif nclx 1-10", "avif nclx 1-11", "avif nclx 1-12"),
        "avif header 12-99-6",
    ),
    "unknown way (cHRM": ("png gAMA 1 cHRM of zeros",),
    "EXIF says Adobe RGB": (
        *("jpeg Exif 2", "jpeg Exif 65535 and R03", "webp Exif 2", "webp Exif 65535 and R03"),
    ),
    "EXIF says that colours are uncalibrated": ("jpeg Exif 65535", "webp Exif 65535"),
    "inks (CMYK) without": ("jpeg CMYK",),
}


def test_what_is_not_known_is_named() -> None:
    found = {name: flaw(made()) for name, made in FILES.items()}
    for sentence, names in FLAWS.items():
        assert {name for name in found if sentence in found[name]} == set(names), sentence
    named = {name for names in FLAWS.values() for name in names}
    assert not [name for name, flaws in found.items() if flaws and name not in named]


def test_a_profile_of_which_a_jpeg_holds_a_part_is_named() -> None:
    """A profile may be split over several segments, in any order."""
    plain, half = saved("JPEG", quality=100), len(P3) // 2
    parts = [
        b"ICC_PROFILE\0" + bytes((number, 2)) + content
        for number, content in ((2, P3[half:]), (1, P3[:half]))
    ]
    parts = [b"\xff\xe2" + struct.pack(">H", len(part) + 2) + part for part in parts]
    whole = plain[:2] + b"".join(parts) + plain[2:]
    assert (
        not flaw(whole)
        and (patches(whole) == patches(saved("JPEG", quality=100, icc_profile=P3))).all()
    )
    lacking = plain[:2] + parts[0] + plain[2:]
    assert "profile that is damaged" in flaw(lacking)
    assert (patches(lacking) == patches(plain)).all()


def by_little_cms(content: bytes, profile: bytes) -> np.ndarray:
    """The patches of a file whose own profile, if it has one, does not count."""
    image = opened(content)
    image.load()
    made = ImageCms.profileToProfile(
        image,
        io.BytesIO(profile),
        ImageCms.createProfile("sRGB"),
        outputMode="RGB",
        flags=ImageCms.Flags.NOOPTIMIZE,  # exact, and ten times slower
    )
    return np.asarray(made)[SIDE // 2, SIDE // 2 :: SIDE].astype(int)


OF_MODES = {"RGB": (P3, LINEAR, PROFILES["Adobe"]), "L": (GREY,), "CMYK": (INKS,)}
SAVED = {"JPEG": "RGB L CMYK", "PNG": "RGB L", "WEBP": "RGB", "AVIF": "RGB", "TIFF": "RGB L CMYK"}


@pytest.mark.parametrize("codec", SAVED)
def test_profiles_of_every_codec_are_those_of_little_cms(codec: str) -> None:
    if codec in ("AVIF", "WEBP") and not features.check(codec.lower()):
        pytest.skip(f"this Pillow reads no {codec}")
    for mode in SAVED[codec].split():
        for profile in OF_MODES[mode]:
            content = saved(codec, mode, icc_profile=profile)
            gaps = np.abs(patches(content) - by_little_cms(content, profile))
            # A table of inks is exact ten times slower: of 4,000 colours 99% are off by 1 or less.
            assert gaps.max() <= (4 if mode == "CMYK" else 1)


def test_profiles_of_jpeg_2000_and_of_bmp() -> None:
    plain = saved("JPEG2000", no_jp2=False)
    assert (patches(plain) == PATCHES).all() and not flaw(plain)
    for method in (2, 3):
        found = patches(jpeg2000(method, LINEAR))
        np.testing.assert_array_equal(found, by_little_cms(plain, LINEAR))
    by_numbers = patches(jpeg2000(5, struct.pack(">HHHB", 12, 13, 0, 128)))
    assert np.abs(by_numbers - by_little_cms(plain, P3)).max() <= 1
    assert "colour space 21 of JPEG 2000" in flaw(jpeg2000(1, struct.pack(">I", 21)))
    assert "HDR picture" in flaw(jpeg2000(5, struct.pack(">HHHB", 9, 16, 0, 128)))
    np.testing.assert_array_equal(patches(bmp(LINEAR)), by_little_cms(plain, LINEAR))


def test_a_tiff_names_what_it_tells_without_a_curve() -> None:
    assert not flaw(saved("TIFF"))
    primaries = saved("TIFF", tiffinfo={319: (0.68, 0.32, 0.265, 0.69, 0.15, 0.06)})
    assert "PrimaryChromaticities" in flaw(primaries)
    assert flaw(saved("TIFF", "CMYK")).startswith("inks (CMYK)")


OF_LITTLE_CMS = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
OF_NUMBERS = icc_profiles.coded_profile(1, 13)
ROUNDED = colour_files.profile("sRGB, rounded", None, "a")  # it moves 1% of the colours by a level


@pytest.mark.parametrize("profile", [PROFILES["sRGB"], OF_LITTLE_CMS, OF_NUMBERS, ROUNDED])
def test_a_profile_of_srgb_changes_no_bit(profile: bytes) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    for mode in ("RGB", "P", "L"):
        image = Image.fromarray(pixels).convert(mode)
        image.save(file := io.BytesIO(), "PNG", icc_profile=profile)
        found = np.asarray(to_rgb(upright(opened(file.getvalue()))))
        np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("name", ["GIMP built-in Linear sRGB", "sRGB", "sRGB IEC61966-2.1", "a"])
def test_the_name_of_a_profile_tells_nothing(name: str) -> None:
    linear = saved("PNG", icc_profile=colour_files.profile("sRGB", 1.0, name))
    assert patches(linear)[3].tolist() == [124] * 3
    usual = saved("PNG", icc_profile=colour_files.profile("sRGB", None, name))
    assert patches(usual).tolist() == [list(one) for one in PATCHES]


def srgb_of(light_N: np.ndarray) -> np.ndarray:
    """Levels of sRGB in [0, 255] of light in [0, 1]."""
    levels = np.linspace(0, 1, 65536)
    return 255 * np.interp(light_N, light(levels), levels)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", [0, 2, 6])
def test_dark_levels_of_linear_light(kind: int, bits: int) -> None:
    """Of 16 bits, more than the first 16 levels that a byte would keep of them are left."""
    numbers = np.arange(256) if bits == 8 else np.arange(0, 4096, 16)
    most = 2**bits - 1
    alpha = (most,) if kind == 6 else ()
    row = [((number,) * (3 if kind else 1)) + alpha for number in numbers.tolist()]
    content = png(kind, bits, row, before=iccp(LINEAR if kind else GREY))
    found = np.asarray(to_rgb(upright(opened(content))))[0]
    assert np.abs(found - srgb_of(numbers / most)[:, None]).max() < 1.5
    assert bits == 8 or len(np.unique(found)) > 60


@pytest.mark.parametrize("profile", [LINEAR, GREY])
def test_numbers_of_many_rows(profile: bytes) -> None:
    """Rows are converted some at a time."""
    levels_HW = np.linspace(0, 255, 150 * 7, dtype=np.float32).reshape(150, 7)
    levels = levels_HW if profile is GREY else np.repeat(levels_HW[..., None], 3, axis=2)
    found_HW3 = icc_profiles.transformed_numbers(levels, profile)
    assert np.abs(found_HW3 - srgb_of(levels_HW / 255)[..., None]).max() < 1.5


@pytest.mark.parametrize("order", ["<", ">"])
def test_dark_levels_of_a_tiff_of_16_bits(order: str) -> None:
    numbers = np.arange(0, 4096, 16)
    content = tiff_of_16_bits(order, numbers, LINEAR)
    found = np.asarray(to_rgb(upright(opened(content))))[0]
    assert np.abs(found - srgb_of(numbers / 65535)[:, None]).max() < 1.5
