"""Finds out whether a video file is as long as its container says.

FFmpeg plays what is left of a truncated file without an error.
"""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

_EBML, _SEGMENT, _CLUSTER = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75"
_ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")  # header object
_ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")  # file properties object
_TS = 188  # bytes of a packet


def missing_bytes(stream: BinaryIO) -> int | None:
    """The number of bytes that a video file lacks at its end; it may lack more.

    None if the format is unknown, or if the file does not say how long it should be. The stream is
    rewound.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    # Long enough that 4 packets of a transport stream begin in it, even if the first is cut.
    head = stream.read(5 * 204)
    if head[:4] == _EBML:
        end = _matroska_end(stream, size)
    elif head[:4] == b"RIFF":
        end = _riff_end(stream, size)
    elif head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        end = _boxes_end(stream, size)
    elif head[:4] == b"OggS":
        end = _ogg_end(stream, size)
    elif head[:3] == b"FLV":
        end = _flv_end(stream, size)
    elif head[:16] == _ASF:
        end = _asf_end(stream)
    else:
        end = _transport_end(stream, head, size)
    stream.seek(0)
    return None if end is None else max(0, end - size)


def _boxes_end(stream: BinaryIO, size: int) -> int | None:
    """End in bytes of an MP4 or QuickTime file by its boxes (ISO/IEC 14496-12, 4.2).

    None if the last box extends to the end of the file, whatever that is.
    """
    end = 0
    while end < size:
        stream.seek(end)
        head = stream.read(8)
        if not head[4:].strip(b"\0"):  # padding
            return end
        length = struct.unpack(">I", head[:4])[0]
        if length == 1:
            length = struct.unpack(">Q", stream.read(8).rjust(8, b"\0"))[0]
        if length == 0:  # the box extends to the end of the file
            return None
        end += max(8, length)
    return end


def _riff_end(stream: BinaryIO, size: int) -> int | None:
    """End in bytes of an AVI file by its RIFF chunks; None if their lengths are unknown."""
    end = 0
    while end + 8 <= size:
        stream.seek(end)
        kind, length = struct.unpack("<4sI", stream.read(8))
        if kind not in (b"RIFF", b"JUNK"):
            return end
        if kind == b"RIFF" and length in (0, 0xFFFFFFFF):  # unknown: it was written to a pipe
            return None
        end += 8 + length + length % 2
    return end


def _matroska_end(stream: BinaryIO, size: int) -> int | None:
    """End in bytes of a Matroska or WebM file (RFC 8794), which is a header and one segment.

    None if the segment is missing, or of unknown size and apparently complete.
    """
    stream.seek(4)
    header = _number(stream)
    stream.seek(stream.tell() + (header or 0))
    if stream.read(4) != _SEGMENT:
        return None
    segment = _number(stream)
    return _elements_end(stream, size) if segment is None else stream.tell() + segment


def _elements_end(stream: BinaryIO, size: int) -> int | None:
    """The byte at which the last element of a Matroska segment of unknown size should end.

    A program that writes to a pipe does not know the size. None if no element extends beyond the
    file.
    """
    end = stream.tell()
    while end < size:
        stream.seek(end)
        kind = stream.read(1)
        if not kind or not kind[0]:  # padding
            return None
        kind += stream.read(8 - kind[0].bit_length())
        length = _number(stream)
        if length is None and kind != _CLUSTER:  # the length itself may be truncated
            return None if stream.tell() < size else size + 1
        end = stream.tell() + (length or 0)
    return end if end > size else None  # the whole rest may be missing


def _number(stream: BinaryIO) -> int | None:
    """Reads an integer of variable length (RFC 8794, 4).

    None for the value "unknown", and if there is no valid integer.
    """
    first = stream.read(1)
    if not first or not first[0]:
        return None
    more = 8 - first[0].bit_length()
    content = bytes([first[0] & (0x7F >> more)]) + stream.read(more)
    value = int.from_bytes(content, "big")
    return None if value == (1 << (7 * (more + 1))) - 1 else value


def _ogg_end(stream: BinaryIO, size: int) -> int | None:
    """End in bytes of an Ogg file by its pages (RFC 3533); None if a page has no header.

    A stream of the file is complete if its last page is marked as such.
    """
    end, still_open = 0, set[bytes]()
    while end < size:
        stream.seek(end)
        head = stream.read(27)
        if head[:4] != b"OggS"[: len(head)]:
            return None
        sizes = stream.read(head[26]) if len(head) == 27 else b""
        if len(head) < 27 or len(sizes) < head[26]:
            return size + 1
        still_open.add(head[14:18])
        if head[5] & 4:
            still_open.discard(head[14:18])
        end += 27 + len(sizes) + sum(sizes)
    return max(end, size + 1) if still_open else end


def _flv_end(stream: BinaryIO, size: int) -> int | None:
    """The byte at which the last tag of a Flash video should end; None if that tag is complete.

    Each tag stands between two copies of its size. The number of tags is not stored.
    """
    stream.seek(5)
    end = int.from_bytes(stream.read(4), "big") + 4
    while end < size:
        stream.seek(end + 1)
        end += 11 + int.from_bytes(stream.read(3), "big") + 4
    return end if end > size else None


def _asf_end(stream: BinaryIO) -> int | None:
    """Size in bytes that the header of an ASF (WMV) file states; None if it states none."""
    stream.seek(0)
    head = stream.read(1 << 16)
    at = head.find(_ASF_FILE)
    return int.from_bytes(head[at + 40 : at + 48], "little") or None if at >= 0 else None


def _transport_end(stream: BinaryIO, head: bytes, size: int) -> int | None:
    """The byte at which the last packet of an MPEG transport stream should end, if it is cut.

    None if no packet is cut, or if the file is not a transport stream. Packets have 188, 192 or 204
    bytes; their number is not stored.
    """
    for length in (_TS, 192, 204):
        for start in range(length):
            if head[start::length][:4] == b"\x47" * 4:
                rest = (size - start) % length
                stream.seek(size - rest)
                is_cut = 0 < rest < _TS and stream.read(1) == b"\x47"
                return size + length - rest if is_cut else None
    return None
