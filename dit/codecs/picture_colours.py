"""Finds the ICC profile of an open picture file, and warns of unknown colours.

If a file states its colours in several ways, the order of PNG's third edition (11.3.2) decides:
codes of H.273 (`cICP`), ICC profile, sRGB, gamma and primaries. In AVIF it is the profile (MIAF),
then the codes in the box, then those in AV1's header. Where standards leave a choice, pictures look
as in Chromium.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple, TypeVar

from PIL import Image, ImageFile

from dit.codecs import icc_profiles
from dit.codecs.icc_profiles import BT709, HDR, SRGB, TELEVISION, UNSPECIFIED

_HDR = "HDR picture: colours are pale, as those of SDR are assumed; convert it to SDR"
_UNUSABLE = "colour profile that is damaged or of other colours: not applied, as in browsers"
_UNKNOWN = "colours that the file states in an unknown way ({}): ignored; convert it to sRGB"
_INKS = "inks (CMYK) without a colour profile: read as browsers do; convert it to sRGB"
_BY_EXIF = "EXIF says {}, and there is no colour profile: read as sRGB, as in browsers"
Found = TypeVar("Found")
_EXIF_IFD, _INTEROPERABILITY_IFD, _COLOUR_SPACE = 0x8769, 0xA005, 0xA001  # EXIF 2.32
_ADOBE_RGB, _UNCALIBRATED = 2, 0xFFFF
_TIFF_PRIMARIES = 319  # TIFF 6.0, section 20
_KNOWN_SPACES = (12, 16, 17, 18)  # CMYK, sRGB, grey, sYCC (ISO/IEC 15444-1 and -2)
_XVYCC = 11
_GAMMA = 1 / 2.2
_NEAR = 0.05  # a gamma alone this near to `_GAMMA`, as part of it, is that of sRGB (libpng)


class ToldColours(NamedTuple):
    """The ICC profile of a picture file (None: sRGB), and what is wrong with its declaration."""

    profile: bytes | None = None  # ICC; None for sRGB, and for what is read as sRGB
    flaws: tuple[str, ...] = ()  # why it does not look as it should


class _Told(NamedTuple):
    """One of a file's declarations of its colours; one that does not count has only a flaw."""

    profile: bytes | None = None
    flaw: str = ""
    counts: bool = True  # False: the next declaration is tried


_Ways = Iterator[_Told | None]
"""The declarations of colours in a file, the best first; None for one that is missing."""


def told_colours(opened: ImageFile.ImageFile) -> ToldColours:
    """The declared colours of an opened picture file whose pixels have not been read yet.

    Declarations are tried from the best to the worst, and the first that can be used counts. The
    flaws are those of the declarations that were tried.
    """
    ways, flaws = _WAYS.get(opened.format or "", _profile_alone)(opened), list[str]()
    for told in filter(None, ways):
        flaws += [told.flaw] * bool(told.flaw)
        if told.counts:
            is_srgb = told.profile is None or icc_profiles.is_srgb(told.profile)
            return ToldColours(None if is_srgb else told.profile, tuple(flaws))
    if not flaws:
        flaws = [_INKS] * (opened.mode == "CMYK") + _by_exif(opened) + _by_tiff(opened)
    return ToldColours(None, tuple(flaws))


def _profile_alone(opened: ImageFile.ImageFile) -> _Ways:
    # For a profile that a JPEG holds only in part, Pillow has None.
    if "icc_profile" in opened.info:
        yield _by_profile(opened, opened.info["icc_profile"] or b"damaged")


def _of_png(opened: ImageFile.ImageFile) -> _Ways:
    info = opened.info
    yield _by_cicp(from_start(opened, _cicp_of))
    yield from _profile_alone(opened)
    if "srgb" in info:
        yield _Told()
    yield _by_gamma(info.get("gamma"), info.get("chromaticity"))


def _of_avif(opened: ImageFile.ImageFile) -> _Ways:
    yield from _profile_alone(opened)
    boxes = from_start(opened, _avif_colours)
    coded = [struct.unpack(">HH", one[4:8]) for one in boxes if one[:4] == b"nclx" and one[7:8]]
    for numbers in coded or from_start(opened, _av1_colours):
        yield _by_nclx(*numbers)


def _of_jpeg2000(opened: ImageFile.ImageFile) -> _Ways:
    for colours in from_start(opened, _jpeg2000_colours):
        match colours[0]:  # the method
            case 1 if (space := int.from_bytes(colours[3:7])) not in _KNOWN_SPACES:
                yield _Told(None, _UNKNOWN.format(f"colour space {space} of JPEG 2000"), False)
            case 2 | 3:
                yield _by_profile(opened, colours[3:])
            case 5:
                yield _by_nclx(*struct.unpack(">HH", colours[3:7]))


def _of_bmp(opened: ImageFile.ImageFile) -> _Ways:
    yield _by_profile(opened, from_start(opened, _bmp_profile))


_WAYS: dict[str, Callable[[ImageFile.ImageFile], _Ways]] = {
    "PNG": _of_png,
    "AVIF": _of_avif,
    "JPEG2000": _of_jpeg2000,
    "BMP": _of_bmp,
}


def _by_profile(opened: ImageFile.ImageFile, profile: bytes | None) -> _Told | None:
    if not profile or opened.mode == "LAB":  # whose numbers tell colours by themselves
        return None
    coded = icc_profiles.coded_of(profile)
    if coded is not None and (told := _by_cicp((*coded, 0, 1))) and told.counts:
        return told
    if icc_profiles.fits(profile, _mode(opened)):
        return _Told(profile)
    # Browsers try the next declaration if a profile is damaged, but not if it fits another mode.
    is_whole = len(profile) >= 128 and len(profile) == int.from_bytes(profile[:4])
    return _Told(None, _UNUSABLE, counts=is_whole)


def _mode(opened: ImageFile.ImageFile) -> str:
    """Pillow's mode of the file, but LA for 16-bit LA, which Pillow would read as RGBA."""
    return "LA" if opened.tile and str(opened.tile[0][3]).startswith("LA;16") else opened.mode


def _by_cicp(code: tuple[int, ...] | None) -> _Told | None:
    """The colours by PNG's chunk `cICP`; None if it is missing or leaves them unspecified.

    `code` are its four numbers, or None if it is missing: H.273's codes of primaries, transfer and
    matrix, then 1 for full range.
    """
    if code is None or code[:2] == (UNSPECIFIED, UNSPECIFIED):
        return None
    primaries, transfer, matrix, full = code
    profile = None
    if (matrix, full) == (0, 1):
        if transfer in HDR:
            return _Told(None, _HDR)
        profile = icc_profiles.coded_profile(primaries, 1 if transfer == _XVYCC else transfer)
    if profile is None:
        numbers = "-".join(map(str, code))
        return _Told(None, _UNKNOWN.format(f"cICP {numbers}"), counts=False)
    return _Told(profile)


def _by_nclx(primaries: int, transfer: int) -> _Told:
    """The colours by H.273's codes of primaries and transfer in a box of AVIF.

    If one code is unknown, the other one still counts. The curves of television, and an unspecified
    transfer, are read as that of sRGB.
    """
    if transfer in HDR:
        return _Told(None, _HDR)
    numbers = 1 if primaries == UNSPECIFIED else primaries, transfer
    if transfer in TELEVISION or transfer == UNSPECIFIED:
        numbers = numbers[0], SRGB
    profile = icc_profiles.coded_profile(*numbers)
    if profile is not None:
        return _Told(profile)
    flaw = _UNKNOWN.format(f"nclx {primaries}-{transfer}")
    known = icc_profiles.coded_profile(numbers[0], SRGB), icc_profiles.coded_profile(1, numbers[1])
    return _Told(known[0] or known[1], flaw)


def _by_gamma(gamma: float | None, xy: tuple[float, ...] | None) -> _Told | None:
    """The colours by PNG's chunks `gAMA` and `cHRM` (`xy`).

    As in browsers, `cHRM` alone does not count. The result is None if there is no `gAMA`, or if
    there is no `cHRM` and `gAMA` is that of sRGB.
    """
    if not gamma or (xy is None and abs(gamma / _GAMMA - 1) < _NEAR):
        return None
    try:
        return _Told(icc_profiles.gamma_profile((*xy[2:], *xy[:2]) if xy else BT709, 1 / gamma))
    except ValueError:
        return _Told(None, _UNKNOWN.format("cHRM"))


def _by_exif(opened: ImageFile.ImageFile) -> list[str]:
    try:
        # `getexif` keeps its first result, which lacks EXIF that stands behind the pixels.
        exif = Image.Exif()
        if opened.format == "TIFF":
            exif = opened.getexif()
        elif "exif" in opened.info:
            exif.load(opened.info["exif"])
        space = exif.get_ifd(_EXIF_IFD).get(_COLOUR_SPACE)
        rule = str(exif.get_ifd(_INTEROPERABILITY_IFD).get(1)) if space else ""
    except Exception:  # noqa: BLE001  # damage makes Pillow raise errors of any type
        return []
    if space == _ADOBE_RGB or rule.startswith("R03"):
        return [_BY_EXIF.format("Adobe RGB")]
    return [_BY_EXIF.format("that colours are uncalibrated")] * (space == _UNCALIBRATED)


def _by_tiff(opened: ImageFile.ImageFile) -> list[str]:
    xy = getattr(opened, "tag_v2", {}).get(_TIFF_PRIMARIES) or BT709
    is_srgb = all(abs(float(a) - b) < 0.01 for a, b in zip(xy, BT709, strict=False))
    return [] if is_srgb else [_UNKNOWN.format("PrimaryChromaticities of TIFF")]


def from_start(opened: ImageFile.ImageFile, reader: Callable[[IO[bytes]], Found]) -> Found:
    """Calls `reader` on the file of `opened` from its first byte; restores the file position."""
    stream = opened.fp
    assert stream is not None, "the file is open until its pixels are decoded"
    at = stream.tell()
    try:
        stream.seek(0)
        return reader(stream)
    finally:
        stream.seek(at)


def _cicp_of(stream: IO[bytes]) -> tuple[int, ...] | None:
    """The four codes in the chunk `cICP` of a PNG file; None if none precedes the pixels.

    Zeros stand for a chunk of the wrong length.
    """
    stream.seek(8)
    while len(head := stream.read(8)) == 8 and head[4:] != b"IDAT":
        length = int.from_bytes(head[:4])
        if head[4:] == b"cICP":
            return tuple(stream.read(4)) if length == 4 else (0, 0, 0, 0)
        stream.seek(length + 4, io.SEEK_CUR)
    return None


def _boxes(stream: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yields (kind, end offset) of each box (ISO/IEC 14496-12).

    The stream is then at the first byte of the content of that box.
    """
    while len(head := stream.read(8)) == 8:
        at, size = stream.tell() - 8, int.from_bytes(head[:4])
        if size == 1:
            size = int.from_bytes(stream.read(8))
        behind = at + size if size else stream.seek(0, io.SEEK_END)
        stream.seek(at + (16 if head[:4] == b"\0\0\0\1" else 8))
        if behind < stream.tell():  # damage
            return
        yield head[4:], behind
        stream.seek(behind)


def _contents(content: bytes) -> list[tuple[bytes, bytes]]:
    stream = io.BytesIO(content)
    return [(kind, content[stream.tell() : end]) for kind, end in _boxes(stream)]


def _first(boxes: Iterable[tuple[bytes, bytes]], kind: bytes) -> bytes:
    return next((content for name, content in boxes if name == kind), b"")


def _box_of_file(stream: IO[bytes], wanted: bytes) -> bytes:
    return next((stream.read(end - stream.tell()) for k, end in _boxes(stream) if k == wanted), b"")


def _avif_colours(stream: IO[bytes]) -> list[bytes]:
    """Contents of the boxes `colr` of the displayed picture of an AVIF file (ISO/IEC 23008-12)."""
    meta = _contents(_box_of_file(stream, b"meta")[4:])
    shown = _first(meta, b"pitm")
    number = int.from_bytes(shown[4:8] if shown[:1] == b"\1" else shown[4:6])
    properties = _contents(_first(meta, b"iprp"))
    boxes = _contents(_first(properties, b"ipco"))
    each = (_associated(content).get(number, ()) for kind, content in properties if kind == b"ipma")
    found = [boxes[index - 1] for indices in each for index in indices if 0 < index <= len(boxes)]
    return [content for kind, content in found if kind == b"colr"]


def _av1_colours(stream: IO[bytes]) -> list[tuple[int, int]]:
    """(primaries, transfer) in the AV1 headers of an AVIF file, where specified (section 5.5.2).

    The list is empty if PyAV is not installed, or if the file is damaged.
    """
    try:
        import av.error
    except ImportError:  # an extra; the tables of such a file are read as sRGB
        return []
    try:
        with av.open(stream) as container:
            codecs = [one.codec_context for one in container.streams.video]
            each = [(int(one.color_primaries), int(one.color_trc)) for one in codecs]
    except (av.error.FFmpegError, OSError, ValueError):  # damage is found where pixels are decoded
        return []
    return [one for one in each if one != (UNSPECIFIED, UNSPECIFIED)]  # transparency tells none


def _associated(content: bytes) -> dict[int, list[int]]:
    """Indices, from 1, of the properties of each item, in the content of a box `ipma`."""
    stream, found = io.BytesIO(content), dict[int, list[int]]()
    version, *_, flags = stream.read(4).ljust(4, b"\0")
    item, wide = (4 if version else 2), (2 if flags & 1 else 1)
    for _ in range(int.from_bytes(stream.read(4))):
        number, count = int.from_bytes(stream.read(item)), int.from_bytes(stream.read(1))
        each = [int.from_bytes(stream.read(wide)) for _ in range(count)]
        if stream.tell() == len(content) and not each:
            return found
        found[number] = [index & (1 << (8 * wide - 1)) - 1 for index in each]  # less "is essential"
    return found


def _jpeg2000_colours(stream: IO[bytes]) -> list[bytes]:
    boxes = _contents(_box_of_file(stream, b"jp2h"))
    return [content for kind, content in boxes if kind == b"colr" and len(content) >= 7]


def _bmp_profile(stream: IO[bytes]) -> bytes | None:
    """The ICC profile in a BMP of version 5 (BITMAPV5HEADER); None if there is none."""
    head = stream.read(14 + 124)[14:]
    if len(head) < 124 or int.from_bytes(head[:4], "little") < 124 or head[56:60] != b"DEBM":
        return None
    place, size = struct.unpack("<II", head[112:120])
    stream.seek(14 + place)
    return stream.read(size)
