"""Finds the members of a tar archive and their positions, by reading only its headers."""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.media.images import open_media
from data_prep.refusals import Reason, RefusedError
from data_prep.sources.listing import OF_SYSTEMS

_BLOCK = tarfile.BLOCKSIZE
# A header holds names and times; one that asks for more memory is damaged or hostile.
_MOST_HEADER = 64 << 10  # bytes
_CHUNK = 1 << 20  # bytes
_COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7-Zip",
}  # fmt: skip
_PLACE = re.compile(r"(.+)\n(\d+)\+(\d+)", re.DOTALL)


def member_location(archive: str, start: int, size: int) -> str:
    """A string for a member's archive, first byte and size, which no file can have as its path."""
    return f"{archive}\n{start}+{size}"


def parse_location(where: str) -> tuple[str, int, int] | None:
    """Splits a string of `member_location` into (archive, first byte, size).

    None if `where` is the path of a plain file.
    """
    found = _PLACE.fullmatch(where)
    return (found[1], int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """Files of a tar archive by path; in a path the archive counts as a folder."""

    archive: str
    places: dict[str, str] = field(default_factory=dict)
    """Path of a file -> its position, a string of `member_location`."""
    refused: dict[str, str] = field(default_factory=dict)
    """Path of a file that cannot be read -> why not."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Number of members that are left out, by kind."""

    def add(self, member: tarfile.TarInfo) -> None:
        """Adds the member to `places`, `refused` or `ignored`; folders are not added.

        The member replaces an earlier one of the same name, as when `tar` unpacks.
        """
        if member.isdir():
            return
        name = _normal(member.name)
        path = f"{self.archive}/{name}"
        if name.startswith("../") or name in ("", ".."):
            self.refused[f"{self.archive}/{member.name}"] = (
                "its name leads out of the archive; rename it"
            )
            return
        if any(part.startswith(".") for part in name.split("/")):
            self.ignored["hidden"] += 1
            return
        if added := OF_SYSTEMS.intersection(name.split("/")[:-1]):
            self.ignored[f"file in a folder {min(added)}, which a file server or system adds"] += 1
            return
        earlier = [found.pop(path, None) for found in (self.places, self.refused)]
        if any(earlier):
            self.ignored["earlier member of the same name in a .tar"] += 1
        if member.islnk():
            self._link(path, f"{self.archive}/{_normal(member.linkname)}")
        elif member.issym():
            self.ignored["symbolic link in a .tar"] += 1
        elif not member.isreg():
            self.ignored["device or unknown member in a .tar"] += 1
        elif member.issparse():
            self.refused[path] = "it is stored sparse; pack the archive without --sparse"
        else:
            self.places[path] = member_location(self.archive, member.offset_data, member.size)

    def _link(self, path: str, target: str) -> None:
        if target in self.places:
            self.places[path] = self.places[target]
        else:
            self.refused[path] = (
                f"it is a hard link to {target}, which no earlier member of the archive holds; add"
                " that file"
            )


def _normal(name: str) -> str:
    """The path to which `tar` unpacks the member `name`: relative, without `.` and inner `..`."""
    return posixpath.normpath(name.lstrip("/") or ".").removeprefix("./")


def read_archive(root: Path, archive: str) -> Contents:
    """Lists the members of the tar at the path `archive` below `root`.

    Raises:
        RefusedError: the archive is compressed, damaged, cut short or no regular file.
    """
    contents = Contents(archive=archive)
    with open_media(root / archive) as stream:
        headers = _Headers(stream)
        try:
            for member in _members(headers):
                contents.add(member)
        # tarfile trusts the numbers and texts of headers; all of these errors have been seen.
        except (
            tarfile.TarError, OSError, ValueError, ArithmeticError, LookupError, TypeError,
            AttributeError, RecursionError,
        ) as error:  # fmt: skip
            reason = f"{_compression(stream) or _cause(error)}; nothing of it is packed"
            raise RefusedError(Reason.BAD_ARCHIVE, reason) from error
        if headers.anything_after:
            contents.ignored["bytes after the end of a .tar, which tar does not read"] += 1
    if not contents.places and not contents.refused:
        contents.ignored["empty .tar"] += 1
    return contents


class _Headers:
    """File object for `tarfile` that refuses to seek or read outside the file."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self.anything_after = False

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int) -> int:
        if not 0 <= position < self._size:
            raise tarfile.ReadError(f"it is cut short at {self._size} bytes")
        return self._stream.seek(position)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_HEADER:
            raise tarfile.ReadError(f"the header at byte {self.tell()} claims {size} bytes")
        return self._stream.read(size)

    def check_end(self, offset: int) -> None:
        """Checks that only zeros, or nothing, follow the last member, which ends at byte `offset`.

        Bytes after the zeros are no error; they set `anything_after`.

        Raises:
            tarfile.ReadError: a damaged header follows.
        """
        self._stream.seek(offset)
        block = self._stream.read(_BLOCK)
        if block.strip(b"\0"):
            raise tarfile.ReadError(f"it is damaged, because no header begins at byte {offset}")
        while block and not self.anything_after:
            block = self._stream.read(_CHUNK)
            self.anything_after = bool(block.strip(b"\0"))


def _members(headers: _Headers) -> Iterator[tarfile.TarInfo]:
    stream: Any = headers  # has all methods that tarfile calls while it lists
    tar = tarfile.TarFile(fileobj=stream, mode="r")
    position = -1
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined] # else it keeps all members in memory
        end = tar.offset  # type: ignore[attr-defined]
        whole = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
        if end <= position or (member.isreg() and not member.issparse() and whole != end):
            raise tarfile.ReadError(f"the header at byte {member.offset} states an impossible size")
        position = end
        yield member
    headers.check_end(tar.offset)  # type: ignore[attr-defined]


def _compression(stream: BinaryIO) -> str | None:
    stream.seek(0)
    start = stream.read(8)
    name = next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None)
    return name and f"it is compressed ({name}), so no file in it can be found; decompress it"


def _cause(error: Exception) -> str:
    if isinstance(error, tarfile.TarError | OSError):
        return f"it is not a whole tar ({error}); copy or make it again"
    return f"it is not a whole tar (a header is damaged: {type(error).__name__}); make it again"
