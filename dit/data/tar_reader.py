"""Reader of one sample's files in a shard, by the shard's index.

1. index_fault       why the bytes of an index cannot be right
2. OpenShards        the shards that were read last, which stay open
3. SampleLocation    location of a sample; its head can be read first and the rest later
4. sample_members    the files of a sample, from its tar headers

This module reads only plain samples: on a local disk, with ustar headers and no extended headers
but those of times. For others it raises NotPlain, and Energon's reader is used.
"""

from __future__ import annotations

import math
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from megatron.energon.flavors.webdataset.config import skip_meta_re

_LOOK_S = 0.1  # seconds between two checks that a shard still exists; each takes 10 us
_OPEN = 128  # shards at a time. Systems allow 1024 open files, some fewer
_SPAN = struct.Struct("<2Q")
BLOCK = 512  # bytes; a tar pads every header and every content to a multiple of this

_HEADER = struct.Struct("100s 24x 12s 12x 8s c 100x 8s 80x 155s 12x")
_PLAIN_FILE, _EXTENDED = (b"0", b"\0"), b"x"
# Extended headers that change neither the name nor the size of a file, as webdataset writes them.
_ONLY_TIMES = {b"mtime", b"atime", b"ctime"}
_USTAR = b"ustar\x0000"

Data = TypeVar("Data", bytes, memoryview)


class NotPlain(Exception):  # noqa: N818 - a case for Energon's reader, not a failure
    """Only a complete tar reader can read this sample."""


class ShardError(ValueError):
    """An error of a shard or its index; the message names the file."""


REINDEX = "restore it, or write it anew with `energon prepare --tar-index-only {folder}`"
"""Advice on a damaged index; `folder` is the folder of the dataset."""


def index_fault(offsets: bytes) -> str:
    """The fault of an index with the bytes `offsets`; empty if there is none.

    Each number is the start of a sample and the end of the one before, so an index that does not
    ascend would read some bytes twice, or none.
    """
    if len(offsets) % 8 or len(offsets) < 16:
        return f"it has {len(offsets)} bytes, not two or more 8-byte numbers"
    found = np.frombuffer(offsets, "<u8")
    if len(falls := np.flatnonzero(found[1:] <= found[:-1])):
        at = int(falls[0])
        return f"number {at + 1} is {found[at + 1]}, after {found[at]}: its numbers do not ascend"
    if len(odd := np.flatnonzero(found % BLOCK)):
        at = int(odd[0])
        return f"number {at} is {found[at]}, where no file of a tar begins (multiples of {BLOCK})"
    return ""


class OpenShard:
    """A shard and its index, both open for reading."""

    def __init__(self, path: str):
        """Opens the shard and its index.

        Raises:
            OSError: a file is missing.
            ShardError: the index is damaged.
        """
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closes with its last reference
        self.number = self._file.fileno()
        self._identity = os.fstat(self.number)
        self._looked = -math.inf
        self._size: int | None = None
        with open(f"{path}.idx", "rb") as index:
            self._index = index.read()
        if fault := index_fault(self._index):
            raise ShardError(f"{path}.idx is damaged: {fault}; restore it, or pack the data again")

    def size_now(self) -> int | None:
        """Size of the shard in bytes; None if its name now belongs to another file.

        The file is looked up at most once in 0.1 s.

        Raises:
            OSError: the file was removed. Open files outlive their names, so the run could go on,
                but would not find the file when it resumes.
        """
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked, found = now, os.stat(self.path)
            self._size = found.st_size if os.path.samestat(found, self._identity) else None
        return self._size

    def span(self, sample: int) -> tuple[int, int]:
        """Byte offsets (start, stop), stop exclusive, in the shard of sample number `sample`.

        Raises:
            ShardError: the index has no such sample.
        """
        try:
            start, stop = _SPAN.unpack_from(self._index, 8 * sample)
        except struct.error as error:
            raise ShardError(
                f"{self.path}.idx has no sample {sample}; restore it, or pack the data again"
            ) from error
        # Folders may come before the first sample, so it starts at 0, as in Energon's reader.
        return start if sample else 0, stop


class OpenShards:
    """The shards that a loader has read last, which stay open."""

    def __init__(self, *, with_sound: bool = False) -> None:
        """Starts with no open shard; with `with_sound`, the sound of samples is read, too."""
        self.with_sound = with_sound
        self._open: dict[str, OpenShard] = {}
        self._memory = bytearray()

    def span(self, path: str, sample: int) -> tuple[int, int]:
        """(start, size) in bytes of sample number `sample` in the shard `path`, which it opens.

        Raises:
            OSError: the shard or its index does not exist.
            ShardError: the index is damaged, has no such sample, or exceeds the shard.
        """
        shard, size = self._checked(path)
        start, stop = shard.span(sample)
        if stop > size:
            raise ShardError(
                f"{path} has {size} bytes, but by its .idx sample {sample} ends at byte {stop}: the"
                " shard is cut short, or its .idx is that of another shard; restore both"
            )
        return start, stop - start

    def read(self, path: str, start: int, size: int) -> bytes:
        """`size` bytes of the shard `path` from byte `start` on; fewer if it ends before.

        The shard must be open, after a call of `span`.
        """
        return os.pread(self._open[path].number, size, start)

    def read_again(self, path: str, start: int, size: int) -> memoryview:
        """Bytes of the shard `path` as from `read`, in memory that the next call overwrites.

        It opens the shard if necessary. The memory is reused because new memory takes as long to
        allocate as to fill, and is in no cache.
        """
        shard, _ = self._checked(path)
        if len(self._memory) < size:
            self._memory = bytearray(size)  # tensors may still be views of the former one
        view = memoryview(self._memory)[:size]
        return view[: os.preadv(shard.number, [view], start)]

    def close(self) -> None:
        self._open.clear()

    def _checked(self, path: str) -> tuple[OpenShard, int]:
        """The open shard at `path`, and its present size in bytes.

        The shard is opened if it was not open, or if another file has taken its name.

        Raises:
            OSError: the shard or its index does not exist.
            ShardError: its index is damaged.
        """
        # The shard that was read last is the last in the dictionary, so the first is closed first.
        shard = self._open.pop(path, None)
        size = None if shard is None else shard.size_now()
        while shard is None or size is None:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open)))
            shard = OpenShard(path)
            size = shard.size_now()
        self._open[path] = shard
        return shard, size


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLocation:
    """The location of a sample: shard, first byte and size."""

    shards: OpenShards
    path: str
    start: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes of the sample, from its byte `offset` on.

        Raises:
            NotPlain: the shard or the sample ends before that.
        """
        return self._whole(self.shards.read, offset, size)

    def parts(self) -> dict[str, bytes | memoryview]:
        """Reads the whole record: extension -> bytes; sound only if `shards.with_sound`.

        Parts with tensors are views of memory that the next call overwrites.

        Raises:
            NotPlain: the sample has changed since its head was read.
            OSError: the shard cannot be read.
        """
        data = self._whole(self.shards.read_again, 0, self.size)
        found = sample_members(lambda at, size: bytes(data[at : at + size]), self.size)
        parts = {split_name(name)[1]: data[at : at + size] for name, at, size in found}
        shards = self.shards
        read = {n: part for n, part in parts.items() if shards.with_sound or not is_sound(n)}
        return {n: part if has_tensors(n) else bytes(part) for n, part in read.items()}

    def _whole(self, read: Callable[[str, int, int], Data], offset: int, size: int) -> Data:
        data = read(self.path, self.start + offset, min(size, self.size - offset))
        if len(data) < size:
            raise NotPlain(
                f"{self.path} has only {len(data)} of the sample's {size} bytes from byte"
                f" {self.start + offset} on"
            )
        return data


def sample_members(read: Callable[[int, int], bytes], size: int) -> Iterator[tuple[str, int, int]]:
    """Yields (name, first byte, size) of each file of a sample.

    `read(start, size)` returns bytes of the sample, whose whole size is `size`.

    Raises:
        NotPlain: a header is damaged or not plain.
    """
    at, found = 0, 0
    while at < size:
        name, length, kind = _header(read(at, BLOCK))
        at += BLOCK
        if not 0 <= length <= size - at:  # a size below 0 would have the same header read for ever
            raise NotPlain(f"{name} of {length} bytes does not fit into its sample of {size} bytes")
        if kind == _EXTENDED:
            _check_times(read(at, length))
        elif not (name.startswith("__") and skip_meta_re.match(name)):
            found += 1
            yield name, at, length
        at += -(-length // BLOCK) * BLOCK
    if not found:
        raise NotPlain("the sample has no file")


def _header(header: bytes) -> tuple[str, int, bytes]:
    """(name, size in bytes, type flag) of the file that follows a tar `header`.

    Raises:
        NotPlain: the header is damaged, or not that of a plain file.
    """
    if len(header) < BLOCK:
        raise NotPlain(f"a tar header has {len(header)} bytes instead of {BLOCK}")
    name, size, checksum, kind, magic, prefix = _HEADER.unpack(header)
    if kind not in (*_PLAIN_FILE, _EXTENDED) or magic != _USTAR:
        raise NotPlain("a tar header is not that of a plain file")
    try:
        # The checksum counts its own field as blanks. The low half of adler32 is 1 + the sum of the
        # bytes, modulo 65521, and 8 times as fast as a sum in Python.
        found = (zlib.adler32(header) & 0xFFFF) - 1 - sum(checksum) + 8 * ord(" ")
        if (found - int(checksum.rstrip(b" \0"), 8)) % 65521:
            raise NotPlain("a tar header does not match its checksum")
        whole = _text(prefix) + "/" + _text(name) if prefix[0] else _text(name)
        return whole, int(size.rstrip(b" \0"), 8), kind
    except ValueError as error:
        raise NotPlain(f"a tar header is damaged ({error})") from error


def _check_times(records: bytes) -> None:
    """Raises NotPlain unless `records`, such as "30 mtime=1234567890.1234567", hold only times."""
    names = {line.partition(b"=")[0].partition(b" ")[2] for line in records.splitlines()}
    if not names <= _ONLY_TIMES:
        raise NotPlain(f"an extended tar header has {names}, not only times")


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode()


def is_sound(extension: str) -> bool:
    """Whether the part with this `extension` holds a video's sound, which few networks read."""
    return extension.startswith("sound.")


def has_tensors(extension: str) -> bool:
    """Whether the part with this `extension` holds tensors after a head with their shapes."""
    return has_named_tensors(extension) or extension.endswith(".bytes")


def has_named_tensors(extension: str) -> bool:
    """Whether the part with this `extension` is a safetensors file."""
    return extension in ("safetensors", "sound.safetensors")


def split_name(name: str) -> tuple[str, str]:
    """(key, extension) of the file `name` in a shard: its path up to the first dot, and the rest.

    Dots in the names of folders do not count.

    Raises:
        NotPlain: the file has no extension, or one that begins with `__`.
    """
    folder, slash, file = name.rpartition("/")
    base, dot, extension = file.partition(".")
    if not base or not dot:
        raise NotPlain(f"the file {name} of the sample has no extension")
    if extension.startswith("__"):
        raise NotPlain(f"the extension of the file {name} begins with __, as only Energon's own do")
    return folder + slash + base, extension
