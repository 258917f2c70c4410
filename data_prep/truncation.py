"""Whether a media file is as long as its outermost boxes say.

FFmpeg plays what is there of a file that was cut, and says nothing.
"""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def missing_bytes(stream: BinaryIO) -> int:
    """Bytes that are missing at the end, at least; 0 for formats that do not say. Rewinds."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    head = stream.read(12)
    if head[:4] == _EBML:
        end = _matroska_end(stream)
    elif head[:4] == b"RIFF":
        end = _riff_end(stream, size)
    elif head[4:8] == b"ftyp":
        end = _boxes_end(stream, size)
    else:
        end = 0
    stream.seek(0)
    return max(0, end - size)


def _boxes_end(stream: BinaryIO, size: int) -> int:
    """MP4 and QuickTime (ISO/IEC 14496-12, 4.2): boxes with their size in front."""
    end = 0
    while end + 8 <= size:
        stream.seek(end)
        length, kind = struct.unpack(">I4s", stream.read(8))
        if not kind.strip(b"\0"):  # padding
            return end
        if length == 1:
            length = struct.unpack(">Q", stream.read(8).ljust(8, b"\0"))[0]
        if length < 8:  # 0 goes to the end of the file, whatever that is
            return end
        end += length
    return end


def _riff_end(stream: BinaryIO, size: int) -> int:
    """AVI: chunks of at most 4 GB one behind the other."""
    end = 0
    while end + 8 <= size:
        stream.seek(end)
        kind, length = struct.unpack("<4sI", stream.read(8))
        if kind not in (b"RIFF", b"JUNK"):
            return end
        end += 8 + length + length % 2
    return end


def _matroska_end(stream: BinaryIO) -> int:
    """Matroska and WebM (RFC 8794): a header, then one segment."""
    stream.seek(4)
    header = _number(stream)
    stream.seek(stream.tell() + (header or 0))
    if stream.read(4) != _SEGMENT:
        return 0
    segment = _number(stream)
    return 0 if segment is None else stream.tell() + segment


def _number(stream: BinaryIO) -> int | None:
    """A number of variable length; None where it says that nobody knows."""
    first = stream.read(1)
    if not first or not first[0]:
        return None
    more = 8 - first[0].bit_length()
    content = bytes([first[0] & (0x7F >> more)]) + stream.read(more)
    value = int.from_bytes(content, "big")
    return None if value == (1 << (7 * (more + 1))) - 1 else value
