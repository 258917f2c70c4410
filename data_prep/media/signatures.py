"""The first bytes of a file -> what it is in truth, for files that are not what their name says."""

from __future__ import annotations

import re

HEAD = 512
"""Bytes of a file that tell."""
_HTML = "it is an HTML page, as where a download failed: fetch it again"
VIDEO = "it is a video: pack it with `data_prep video`"
_CONVERT = "convert it to JPEG or PNG"
_KINDS: tuple[tuple[bytes, str], ...] = (  # regular expression, what it is and what to do
    (rb"version https://git-lfs", "it is a pointer of Git LFS: `git lfs pull` fetches the file"),
    (rb"(?i)\s*(<!doctype html|<html|<head|<body)", _HTML),
    (rb"(?i)\s*(<\?xml|<svg|<!doctype svg)", f"it is SVG or XML: {_CONVERT}"),
    (rb"....ftyp(hei|hev|mif1|msf1)", f"it is HEIC: {_CONVERT}"),
    (rb"....ftypavi[fs]", f"it is AVIF, which this Pillow does not read: {_CONVERT}"),
    (rb"\x00\x00\x00\x0cJXL |\xff\x0a", f"it is JPEG XL: {_CONVERT}"),
    (rb"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI |OggS|FLV\x01", VIDEO),
    (rb"%PDF|%!PS", f"it is a document, PDF or PostScript: {_CONVERT}"),
    (rb"8BPS", f"it is a document of Photoshop: {_CONVERT}"),
    (rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|Rar!|\x28\xb5\x2f\xfd", "it is an archive: unpack it"),
    (rb"\x00+\Z", "it begins with zeros alone, as where a copy broke off: copy it again"),
)  # fmt: skip
_IMAGES = (
    rb"P[1-7]\s|\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM|II\*\x00|MM\x00\*|\x00\x00\x00\x0cjP"
)


def what_it_is(head: bytes) -> str | None:
    """What a file with these first bytes is, and what to do with it; None if it is not known."""
    for pattern, words in _KINDS:
        if re.match(pattern, head, re.DOTALL):
            return words
    if head and head.isascii() and not re.search(rb"[\x00-\x08\x0e-\x1f]", head):
        return "it is text, and no media"
    return None


def begins_as_image(head: bytes) -> bool:
    """Whether a file begins as those of a known format do."""
    return re.match(_IMAGES, head, re.DOTALL) is not None
