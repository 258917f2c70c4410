"""Pictures of eight patches by codec and description of colours; ICC profiles for them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

SIDE = 16
"""Pixels of a patch."""
PATCHES = (
    *((200, 60, 40), (60, 200, 40), (40, 60, 200), (51, 51, 51)),
    *((128, 128, 128), (255, 255, 255), (0, 0, 0), (230, 180, 120)),
)
ALPHA = (255, 255, 255, 255, 255, 255, 0, 128)
_PRIMARIES = {  # x and y of red, green, blue and white
    "sRGB": (0.64, 0.33, 0.3, 0.6, 0.15, 0.06, 0.3127, 0.329),
    "P3": (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, 0.3127, 0.329),
    "Adobe": (0.64, 0.33, 0.21, 0.71, 0.15, 0.06, 0.3127, 0.329),
    "sRGB, rounded": (0.6402, 0.33, 0.3, 0.5998, 0.15, 0.06, 0.3127, 0.329),
}
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
_D50 = np.array([0.9642, 1.0, 0.8249])


def _fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def _assembled(space: bytes, name: str, tags: dict[bytes, bytes], pcs: bytes = b"XYZ ") -> bytes:
    """A profile (ICC.1:2001) with a name."""
    text = b"desc\0\0\0\0" + struct.pack(">I", len(name) + 1) + name.encode() + bytes(79)
    xyz = b"XYZ \0\0\0\0" + _fixed(*_D50)
    tags = {b"desc": text, b"cprt": b"text\0\0\0\0none\0", b"wtpt": xyz} | tags
    offset, table, data = 132 + 12 * len(tags), b"", b""
    for tag, content in tags.items():
        table += tag + struct.pack(">II", offset + len(data), len(content))
        data += content + bytes(-len(content) % 4)
    kind = b"prtr" if space == b"CMYK" else b"mntr"
    head = struct.pack(">I4xI4s4s4s", offset + len(data), 0x02400000, kind, space, pcs)
    head += struct.pack(">6H", 2024, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _fixed(*_D50)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data


def light(level: np.ndarray) -> np.ndarray:
    """IEC 61966-2-1: levels of sRGB in [0, 1] -> light."""
    return np.where(level <= 0.04045, level / 12.92, ((level + 0.055) / 1.055) ** 2.4)


def _curve(gamma: float | None) -> bytes:
    if gamma is not None:
        return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))
    table = np.rint(65535 * light(np.linspace(0, 1, 1024))).astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", 1024) + table.tobytes()


def profile(primaries: str, gamma: float | None, name: str, **more: bytes) -> bytes:
    """An ICC profile of a matrix and a curve, that of sRGB where `gamma` is None."""
    x_4, y_4 = np.reshape(_PRIMARIES[primaries], (4, 2)).T
    columns = np.stack([x_4, y_4, 1 - x_4 - y_4]) / y_4
    white = columns[:, 3]
    matrix = columns[:, :3] * np.linalg.solve(columns[:, :3], white)
    cones = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white))
    adapted = np.linalg.solve(_BRADFORD, cones @ _BRADFORD @ matrix)
    tags = dict[bytes, bytes]()
    for letter, column in zip((b"r", b"g", b"b"), adapted.T, strict=True):
        tags[letter + b"XYZ"] = b"XYZ \0\0\0\0" + _fixed(*column)
        tags[letter + b"TRC"] = _curve(gamma)
    return _assembled(b"RGB ", name, tags | {key.encode(): value for key, value in more.items()})


def _inks() -> bytes:
    """Made-up inks: a table of 9 levels of each, in Lab (lut16Type)."""
    level = np.linspace(0, 1, 9)
    cyan, magenta, yellow, black = np.meshgrid(level, level, level, level, indexing="ij")
    clear = (1 - 0.4 * cyan) * (1 - 0.5 * magenta) * (1 - 0.08 * yellow) * (1 - 0.88 * black)
    a = (-32 * cyan + 68 * magenta - 5 * yellow) * (1 - black)
    b = (-45 * cyan - 5 * magenta + 85 * yellow) * (1 - black)
    lab = np.stack([clear * 65280, (a + 128) * 256, (b + 128) * 256], axis=-1)
    table = b"mft2\0\0\0\0" + bytes((4, 3, 9, 0)) + _fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    line = struct.pack(">2H", 0, 65535)
    table += struct.pack(">HH", 2, 2) + line * 4 + np.rint(lab).astype(">u2").tobytes() + line * 3
    return _assembled(b"CMYK", "inks", {b"A2B0": table}, pcs=b"Lab ")


def _coded_tag(*numbers: int) -> bytes:
    return profile("sRGB", None, "numbers", cicp=b"cicp\0\0\0\0" + bytes(numbers))


P3 = profile("P3", None, "Display P3")
LINEAR = profile("sRGB", 1.0, "GIMP built-in Linear sRGB")
GREY = _assembled(b"GRAY", "Linear grey", {b"kTRC": _curve(1.0)})
INKS = _inks()
PROFILES = {
    "P3": P3,
    "linear sRGB": LINEAR,
    "Adobe": profile("Adobe", 563 / 256, "Adobe RGB (1998)"),
    "sRGB": profile("sRGB", None, "sRGB IEC61966-2.1"),
    "cut short": P3[:200],
    "of grey": GREY,
    "of inks": INKS,
    "numbers 12-8": _coded_tag(12, 8, 0, 1),
    "numbers 9-16": _coded_tag(9, 16, 0, 1),
}


def chunk(kind: bytes, content: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + crc


def png(
    colours: int,
    bits: int,
    row: list[tuple[int, ...]],
    clear: bytes = b"",
    palette: bytes = b"",
    before: bytes = b"",
) -> bytes:
    """A PNG file (ISO/IEC 15948) of one row: its type of colours, content of tRNS, chunks."""
    text = "".join(format(value, f"0{bits}b") for pixel in row for value in pixel)
    text += "0" * (-len(text) % 8)
    pixels = b"\0" + int(text, 2).to_bytes(len(text) // 8, "big")
    header = struct.pack(">IIBBBBB", len(row), 1, bits, colours, 0, 0, 0)
    kept = chunk(b"IHDR", header) + before
    kept += b"".join(chunk(k, c) for k, c in ((b"PLTE", palette), (b"tRNS", clear)) if c)
    kept += chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + kept


_SRGB = chunk(b"sRGB", b"\0")
_TYPES = {"grey": 0, "RGB": 2, "palette": 3, "grey and alpha": 4, "RGBA": 6}


def iccp(content: bytes) -> bytes:
    return chunk(b"iCCP", b"a profile\0\0" + zlib.compress(content))


def cicp(*numbers: int) -> bytes:
    """Primaries and transfer; matrix and range where they are not those of full-range RGB."""
    return chunk(b"cICP", bytes((*numbers, *(0, 1)[len(numbers) - 2 :])))


def gamma(value: float, primaries: str | None = None) -> bytes:
    """The chunks gAMA and cHRM."""
    made = chunk(b"gAMA", struct.pack(">I", round(value * 100_000)))
    return made + (chrm(primaries) if primaries else b"")


def chrm(primaries: str) -> bytes:
    xy = [round(one * 100_000) for one in _PRIMARIES[primaries]]
    return chunk(b"cHRM", struct.pack(">8I", *xy[6:], *xy[:6]))


def patches_png(before: bytes = b"", kind: str = "RGB", bits: int = 8) -> bytes:
    """The patches as a PNG of a kind in `_TYPES`; with alpha where it has some, or a palette."""
    forms: dict[str, list[tuple[int, ...]]] = {
        "grey": [(green,) for _, green, _ in PATCHES],
        "RGB": [*PATCHES],
        "palette": [(number,) for number in range(len(PATCHES))],
        "grey and alpha": [(one[1], alpha) for one, alpha in zip(PATCHES, ALPHA, strict=True)],
        "RGBA": [(*one, alpha) for one, alpha in zip(PATCHES, ALPHA, strict=True)],
    }
    wide = 257 if bits == 16 else 1
    row = [tuple(wide * value for value in pixel) for pixel in forms[kind] for _ in range(SIDE)]
    palette = bytes(np.array(PATCHES, np.uint8)) if kind == "palette" else b""
    return png(_TYPES[kind], bits, row, bytes(ALPHA) if palette else b"", palette, before)


def saved(codec: str, mode: str = "RGB", **options: Any) -> bytes:
    """The patches, as Pillow writes them."""
    pixels = np.broadcast_to(np.repeat(np.array(PATCHES, np.uint8), SIDE, axis=0), (SIDE, 128, 3))
    image = Image.fromarray(pixels.copy())
    if mode == "RGBA":
        alpha = np.broadcast_to(np.repeat(np.array(ALPHA, np.uint8), SIDE), (SIDE, 128))
        image.putalpha(Image.fromarray(alpha.copy()))
    image = image.getchannel("G") if mode == "L" else image.convert(mode)
    image.save(file := io.BytesIO(), codec, **options)
    return file.getvalue()


def avif(nclx: tuple[int, int] | None = None, mode: str = "RGB", **options: Any) -> bytes:
    """An AVIF file whose box `nclx` has these primaries and this transfer."""
    options = {"quality": 100, "speed": 10, "subsampling": "4:4:4"} | options
    content = bytearray(saved("AVIF", mode, **options))
    if nclx is not None:
        at = content.index(b"nclx") + 4
        content[at : at + 4] = struct.pack(">HH", *nclx)
    return bytes(content)


def avif_by_header(primaries: int, transfer: int, matrix: int, mode: str = "RGB") -> bytes:
    """An AVIF file without a box `colr`, whose header of AV1 has these three numbers."""
    content = avif(mode=mode).replace(b"colrnclx", b"freenclx")
    bits = "".join(f"{byte:08b}" for byte in content)
    old, new = (
        "".join(f"{n:08b}" for n in one) for one in ((1, 13, 6), (primaries, transfer, matrix))
    )
    assert bits.count(old) == 1  # what `saved` makes of them
    return int(bits.replace(old, new), 2).to_bytes(len(content))


def bmp(content: bytes) -> bytes:
    """A BMP file of version 5 with a profile (BITMAPV5HEADER)."""
    old = saved("BMP")
    pixels = old[int.from_bytes(old[10:14], "little") :]
    header = struct.pack("<I", 124) + old[18:54] + bytes(16) + b"DEBM" + bytes(48)
    header += struct.pack("<IIII", 4, 124 + len(pixels), len(content), 0)
    body = header + pixels + content
    return struct.pack("<2sI4xI", b"BM", 14 + len(body), 138) + body


def tiff_of_16_bits(order: str, greys: np.ndarray, content: bytes) -> bytes:
    """A TIFF file (TIFF 6.0) of one row of RGB, in the order of bytes `<` or `>`."""
    pixels = np.repeat(greys, 3).astype(f"{order}u2").tobytes()
    at = 8 + 2 + 12 * 9 + 4
    short = {256: len(greys), 257: 1, 259: 1, 262: 2, 277: 3, 278: 1}
    fields = {tag: struct.pack(f"{order}HHIHxx", tag, 3, 1, value) for tag, value in short.items()}
    fields[258] = struct.pack(f"{order}HHII", 258, 3, 3, at)
    fields[273] = struct.pack(f"{order}HHII", 273, 4, 1, at + 6)
    fields[34675] = struct.pack(f"{order}HHII", 34675, 7, len(content), at + 6 + len(pixels))
    body = b"".join(field for _, field in sorted(fields.items())) + bytes(4)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(fields))
    return head + body + struct.pack(f"{order}3H", 16, 16, 16) + pixels + content


def jpeg2000(method: int, colours: bytes) -> bytes:
    """A JP2 file with this content of its box `colr`, behind its method."""
    old = saved("JPEG2000", no_jp2=False)
    at = old.index(b"colr") - 4
    size, made = int.from_bytes(old[at : at + 4]), b"colr" + bytes((method, 0, 0)) + colours
    head = old.index(b"jp2h") - 4
    whole = int.from_bytes(old[head : head + 4]) - size + len(made) + 4
    box = struct.pack(">I", len(made) + 4) + made
    return old[:head] + struct.pack(">I", whole) + old[head + 4 : at] + box + old[at + size :]


_jpeg = partial(saved, "JPEG", quality=100, subsampling=0)
_webp = partial(saved, "WEBP", lossless=True, exact=True)


def _exif(colour_space: int, rule: str | None = None) -> bytes:
    made = Image.Exif()
    made[0x8769] = {0xA001: colour_space} | ({0xA005: {1: rule}} if rule else {})
    return made.tobytes()


def _with_adobe(transform: int) -> bytes:
    """A JPEG of YCbCr with Adobe's marker in the place of JFIF's."""
    content = _jpeg()
    behind = 4 + int.from_bytes(content[4:6])
    marker = struct.pack(">HH5sHHHB", 0xFFEE, 14, b"Adobe", 100, 0, 0, transform)
    return content[:2] + marker + content[behind:]


CODES = [(12, 13), (9, 13), (1, 13), (1, 1), (9, 1), (9, 14), (9, 15), (12, 1), (1, 6), (6, 6)]
CODES += [(5, 6), (7, 7), (1, 4), (1, 5), (1, 8), (12, 8), (4, 4), (8, 13), (10, 13), (10, 8)]
CODES += [(10, 17), (11, 13), (11, 17), (22, 13), (2, 2), (1, 2), (12, 2), (2, 13), (2, 8)]
CODES += [(0, 0), (3, 13), (99, 13), (12, 99), (1, 9), (1, 10), (1, 11), (1, 12)]
CODES += [(9, 16), (9, 18), (12, 16), (1, 18)]
"""Primaries and transfer (ITU-T H.273)."""
_PNG_WAYS: dict[str, bytes] = {
    **{f"iCCP {name}": iccp(content) for name, content in PROFILES.items()},
    **{f"cICP {one[0]}-{one[1]}": cicp(*one) for one in CODES},
    **{f"gAMA {value}": gamma(value) for value in (0, 0.4, 0.43, 0.44, 0.45455, 0.48, 1, 2)},
    "sRGB": _SRGB,
    "cHRM": chrm("P3"),
    "gAMA 0.45455 cHRM sRGB": gamma(0.45455, "sRGB"),
    "gAMA 0.45455 cHRM P3": gamma(0.45455, "P3"),
    "gAMA 1 cHRM P3": gamma(1, "P3"),
    "gAMA 1 cHRM of zeros": gamma(1) + chunk(b"cHRM", bytes(32)),
    "cICP 12-13 of narrow range": cicp(12, 13, 0, 0),
    "cICP 12-13 of a matrix": cicp(12, 13, 1, 1),
    "cICP of three bytes": chunk(b"cICP", bytes((12, 13, 0))),
    "cICP twice": cicp(12, 13) + cicp(1, 8),
    "cICP 12-13, iCCP": cicp(12, 13) + iccp(LINEAR),
    "cICP 2-2, iCCP": cicp(2, 2) + iccp(LINEAR),
    "cICP 12-99, iCCP": cicp(12, 99) + iccp(LINEAR),
    "cICP 9-16, iCCP": cicp(9, 16) + iccp(LINEAR),
    "cICP 12-13, sRGB": cicp(12, 13) + _SRGB,
    "cICP 2-2, gAMA": cicp(2, 2) + gamma(1, "sRGB"),
    "iCCP, sRGB": iccp(P3) + _SRGB,
    "iCCP, gAMA": iccp(P3) + gamma(1, "sRGB"),
    "iCCP cut short, gAMA": iccp(P3[:200]) + gamma(1, "sRGB"),
    "iCCP of grey, gAMA": iccp(GREY) + gamma(1),
    "iCCP cut short, sRGB": iccp(P3[:200]) + _SRGB,
    "sRGB, gAMA": _SRGB + gamma(1, "P3"),
}
_WAYS_OF_MODES = ("iCCP P3", "iCCP linear sRGB", "iCCP of grey", "cICP 12-13", "cICP 12-8")
_WAYS_OF_MODES += ("gAMA 1", "gAMA 1 cHRM P3")


Made = dict[str, Callable[[], bytes]]


def _of_png() -> Made:
    made: Made = {f"png {name}": partial(patches_png, way) for name, way in _PNG_WAYS.items()}
    for kind in _TYPES:
        for bits in (8,) if kind == "palette" else (8, 16):
            made[f"png {kind} {bits}"] = partial(patches_png, b"", kind, bits)
            for name in _WAYS_OF_MODES:
                way = _PNG_WAYS[name]
                made[f"png {kind} {bits} {name}"] = partial(patches_png, way, kind, bits)
    return made


def _of_avif() -> Made:
    made: Made = {f"avif nclx {one[0]}-{one[1]}": partial(avif, one) for one in CODES}
    for mode in ("L", "RGBA"):
        for one in ((1, 13), (12, 13), (12, 8)):
            made[f"avif {mode} nclx {one[0]}-{one[1]}"] = partial(avif, one, mode)
    for name in ("P3", "linear sRGB", "Adobe", "sRGB"):
        made[f"avif ICC {name}"] = partial(avif, icc_profile=PROFILES[name])
    for one in ((1, 13, 6), (2, 2, 2), (12, 13, 6), (12, 8, 6), (9, 1, 9), (9, 16, 6), (12, 99, 6)):
        made[f"avif header {'-'.join(map(str, one))}"] = partial(avif_by_header, *one)
    made["avif RGBA header 12-13-6"] = partial(avif_by_header, 12, 13, 6, "RGBA")
    of_grey = {"mode": "L", "subsampling": "4:0:0"}
    return made | {
        "avif none": avif,
        "avif ICC P3, nclx 12-8": partial(avif, (12, 8), icc_profile=P3),
        "avif ICC P3, nclx 9-16": partial(avif, (9, 16), icc_profile=P3),
        "avif RGBA ICC linear sRGB": partial(avif, mode="RGBA", icc_profile=LINEAR),
        "avif grey ICC of grey": partial(avif, icc_profile=GREY, **of_grey),
        "avif grey ICC linear sRGB": partial(avif, icc_profile=LINEAR, **of_grey),
    }


def _of_jpeg_and_webp() -> Made:
    exifs = {"1": (1,), "2": (2,), "65535": (0xFFFF,), "65535 and R03": (0xFFFF, "R03")}
    made: Made = {}
    for codec, save in {"jpeg": _jpeg, "webp": _webp}.items():
        made[f"{codec} none"] = save
        for name, content in PROFILES.items():
            made[f"{codec} ICC {name}"] = partial(save, icc_profile=content)
        for name, told in exifs.items():
            made[f"{codec} Exif {name}"] = partial(save, exif=_exif(*told))
        both = {"exif": _exif(0xFFFF, "R03"), "icc_profile": P3}
        made[f"{codec} Exif 65535 and R03, ICC P3"] = partial(save, **both)
    return made | {
        "webp RGBA ICC linear sRGB": partial(_webp, "RGBA", icc_profile=LINEAR),
        "jpeg grey": partial(_jpeg, "L"),
        "jpeg grey ICC of grey": partial(_jpeg, "L", icc_profile=GREY),
        "jpeg grey ICC linear sRGB": partial(_jpeg, "L", icc_profile=LINEAR),
        "jpeg CMYK": partial(_jpeg, "CMYK"),
        "jpeg CMYK ICC of inks": partial(_jpeg, "CMYK", icc_profile=INKS),
        "jpeg CMYK ICC P3": partial(_jpeg, "CMYK", icc_profile=P3),
        "jpeg of RGB": partial(_jpeg, keep_rgb=True),
        "jpeg of RGB ICC linear sRGB": partial(_jpeg, keep_rgb=True, icc_profile=LINEAR),
        "jpeg Adobe 0": partial(_with_adobe, 0),
        "jpeg Adobe 1": partial(_with_adobe, 1),
    }


FILES: Made = _of_png() | _of_avif() | _of_jpeg_and_webp()
"""What Chromium opens, by name: codec, kind of pixels and description of colours."""
FILES |= {"bmp none": partial(saved, "BMP"), "bmp ICC P3": partial(bmp, P3)}
