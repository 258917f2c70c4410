"""Samples of a shard by their place: their heads now, all of them when they are chosen.

1. Place         where a sample lies: all that a buffer need keep of its payload
2. PlainReader   what Energon's reader gives of a sample, with a head instead of its tensors

Only what is plain is read here: a local disk, ustar headers and times. The rest is Energon's.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.energon.flavors.webdataset.config import skip_meta_re
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.source_info import SourceInfo

from dit.data.records import Head, head_length
from dit.data.tar.file_cache import BLOCK, NotPlain, OpenShards

PLACE = "__place__"
"""Part of a record that has heads only: where all of it lies."""

# The .json and the description of the tensors of most samples. Smaller ones are read whole.
_WINDOW = 8192
_LARGE = 2**17  # more than the head of any tensors has
_HEADER = struct.Struct("100s 24x 12s 12x 8s c 100x 8s 80x 155s 12x")
_PLAIN_FILE, _EXTENDED = (b"0", b"\0"), b"x"
# Extended headers that change neither the name nor the size of a file, as webdataset writes them.
_ONLY_TIMES = {b"mtime", b"atime", b"ctime"}
_USTAR = b"ustar\x0000"

Data = TypeVar("Data", bytes, memoryview)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLocation:
    """Where a sample lies."""

    shards: OpenShards
    path: str
    start: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the sample.

        Raises:
            NotPlain: the shard ends before, or the sample.
        """
        return self._whole(self.shards.read, offset, size)

    def parts(self) -> dict[str, bytes | memoryview]:
        """The whole record: extension -> bytes, those of the tensors until the next call.

        Raises:
            NotPlain: it is not what it was when its head was read.
            OSError: the shard cannot be read.
        """
        data = self._whole(self.shards.read_again, 0, self.size)
        found = members(lambda at, size: bytes(data[at : at + size]), self.size)
        parts = {_split(name)[1]: data[at : at + size] for name, at, size in found}
        return {n: part if n == "safetensors" else bytes(part) for n, part in parts.items()}

    def _whole(self, read: Callable[[str, int, int], Data], offset: int, size: int) -> Data:
        data = read(self.path, self.start + offset, min(size, self.size - offset))
        if len(data) < size:
            raise NotPlain(f"{len(data)} bytes of {size} at {self.start + offset} in {self.path}")
        return data


class PlainReader:
    """Reads plain samples of what an Energon reader reads."""

    def __init__(self, reader: ShardInfosITarReader, shards: OpenShards):
        self._reader = reader
        self._shards = shards
        self._paths: dict[int, str | None] = {}  # of shards; None for those that are not local

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        """The record of Energon's reader; None where it is excluded.

        Of one that is not small, `.safetensors` is a Head.

        Raises:
            NotPlain: Energon's reader is to read it.
            OSError: a file cannot be read.
        """
        shard = bisect_right(self._reader.shard_count_cumsum, index) - 1
        path = self._paths[shard] if shard in self._paths else self._local(shard)
        if path is None:
            raise NotPlain("not a local file")
        start, size = self._shards.span(path, index - self._reader.shard_count_cumsum[shard])
        place = SampleLocation(shards=self._shards, path=path, start=start, size=size)
        return self._record(place, self._reader.shard_infos[shard].name, index)

    def close(self) -> None:
        self._shards.close()

    def _local(self, shard: int) -> str | None:
        path = self._reader.shard_infos[shard].path
        self._paths[shard] = str(path.local_path()) if path.is_local() else None
        return self._paths[shard]

    def _record(self, place: SampleLocation, shard: str, index: int) -> dict[str, Any] | None:
        window = _Window(place)
        parts, names, key = {}, [], None
        for name, at, size in members(window, place.size):
            base, extension = _split(name)
            if key is None:
                key, wanted = base, self._reader.sample_filter
                if wanted is not None and not wanted(f"{shard}/{base}"):
                    return None
            if base != key:
                raise NotPlain(f"{base} beside {key}")
            if self._reader.part_filter is None or self._reader.part_filter(extension):
                whole = place.size <= _WINDOW or extension != "safetensors"
                parts[extension] = window(at, size) if whole else _head(window, at, size)
                names.append(name)
        source = SourceInfo(
            dataset_path=self._reader.base_path,
            index=index,
            shard_name=shard,
            file_names=tuple(names),
        )
        return {
            "__key__": key,
            "__shard__": shard,
            "__restore_key__": ("Webdataset", index),
            "__sources__": (source,),
            **({PLACE: place} if place.size > _WINDOW else {}),
            **parts,
        }


class _Window:
    """Bytes of a sample, of which some more than the wanted ones are read at a time."""

    def __init__(self, place: SampleLocation):
        self._place = place
        self._from, self._data = 0, place.read(0, min(_WINDOW, place.size))

    def __call__(self, at: int, size: int) -> bytes:
        begin = at - self._from
        if begin < 0 or begin + size > len(self._data):
            more = min(max(size, _WINDOW), self._place.size - at)
            self._from, self._data, begin = at, self._place.read(at, more), 0
        return self._data[begin : begin + size]


def _head(window: _Window, at: int, size: int) -> Head | bytes:
    if size <= 8:
        return window(at, size)
    length = head_length(window(at, 8))
    # A garbled length would have all of it read; its first bytes are as good.
    return Head(data=window(at, length if length <= min(size, _LARGE) else 8), size=size)


def members(read: Callable[[int, int], bytes], size: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, size) of the files of a sample that takes `size` bytes; `read` gives them.

    Raises:
        NotPlain: a header is damaged, or no plain one.
    """
    at, found = 0, 0
    while at < size:
        name, length, kind = _header(read(at, BLOCK))
        at += BLOCK
        if not 0 <= length <= size - at:  # a size below 0 would have the same header read for ever
            raise NotPlain(f"{name} has {length} bytes, and its sample {size}")
        if kind == _EXTENDED:
            _check_times(read(at, length))
        elif not (name.startswith("__") and skip_meta_re.match(name)):
            found += 1
            yield name, at, length
        at += -(-length // BLOCK) * BLOCK
    if not found:
        raise NotPlain("no file")


def _header(header: bytes) -> tuple[str, int, bytes]:
    """Name, size and kind of what follows."""
    if len(header) < BLOCK:
        raise NotPlain("the header is cut")
    name, size, checksum, kind, magic, prefix = _HEADER.unpack(header)
    if kind not in (*_PLAIN_FILE, _EXTENDED) or magic != _USTAR:
        raise NotPlain("no plain file")
    try:
        # The sum takes its own field for blanks. The low half of adler32 is 1 + the sum of the
        # bytes, modulo 65521, 8 times as fast as to add them here.
        found = (zlib.adler32(header) & 0xFFFF) - 1 - sum(checksum) + 8 * ord(" ")
        if (found - int(checksum.rstrip(b" \0"), 8)) % 65521:
            raise NotPlain("the header is damaged")
        whole = _text(prefix) + "/" + _text(name) if prefix[0] else _text(name)
        return whole, int(size.rstrip(b" \0"), 8), kind
    except ValueError as error:
        raise NotPlain(f"header: {error}") from error


def _check_times(records: bytes) -> None:
    """Of lines "30 mtime=1234567890.1234567"."""
    names = {line.partition(b"=")[0].partition(b" ")[2] for line in records.splitlines()}
    if not names <= _ONLY_TIMES:
        raise NotPlain(f"an extended header of {names}")


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode()


def _split(name: str) -> tuple[str, str]:
    """Key and extension: what comes before and after the first dot of the last part of the path."""
    folder, slash, file = name.rpartition("/")
    base, dot, extension = file.partition(".")
    if not base or not dot:
        raise NotPlain(f"{name} has no extension")
    if extension.startswith("__"):
        raise NotPlain(f"{name} has the name of a part of a record")
    return folder + slash + base, extension
