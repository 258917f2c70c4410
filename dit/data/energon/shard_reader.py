"""Reads records of shards for Energon, even of damaged shards.

1. SafeReader     reports damage as a record instead of ending the loader
2. PlainReader    plain samples: first the head of a record (read_head), and the whole record when
                  it is chosen for a pack
3. read_whole     other samples, remote or with unusual headers, by Energon's own reader
"""

from __future__ import annotations

import struct
import tarfile
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Self

from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.source_info import SourceInfo

from dit.data.energon.internals import tar_of_sample
from dit.data.records import PLACE, UNREADABLE, head_length
from dit.data.tar_reader import (
    NotPlain,
    OpenShards,
    SampleLocation,
    ShardError,
    has_named_tensors,
    has_tensors,
    is_sound,
    sample_members,
    split_name,
)
from dit.stored_samples import MLPERF_HEAD, RecordHeader

_DAMAGE = (
    *(tarfile.TarError, OSError, EOFError, struct.error),
    # What tarfile and Energon make of garbled headers.
    *(ValueError, LookupError, AttributeError, TypeError, ArithmeticError),
    *(RecursionError, MemoryError),
)
# What may happen to a sample between the reading of its head and of the whole.
_LOST = (NotPlain, ShardError, OSError, MemoryError)
# The .json and the description of the tensors of most samples. Smaller samples are read whole.
_WINDOW = 8192
_LARGE = 2**17  # more than the head of any tensors has
_OF_ENERGON = {"__key__", "__shard__", "__restore_key__", "__sources__"}


class SafeReader:
    """An Energon shard reader that reports damage as a record.

    Energon's own reader ends the loader, because its error handlers do not see faults of the tar.
    """

    def __init__(self, reader: ShardInfosITarReader, shards: OpenShards):
        self._reader = reader
        self._plain = PlainReader(reader, shards)

    def __len__(self) -> int:
        return len(self._reader)

    def __str__(self) -> str:
        return f"SafeReader({self._reader})"

    def __getitem__(self, index: int) -> Any:
        try:
            try:
                return self._read(index)
            except _DAMAGE:
                self._reopen()  # a passing fault of a network drive deserves a second try
                return self._read(index)
        except _DAMAGE as error:
            self._reopen()
            return self._unreadable(index, error)

    def _read(self, index: int) -> Any:
        try:
            return self._plain[index]
        except NotPlain:
            return read_whole(self._reader, index)

    def _reopen(self) -> None:
        self._plain.close()
        self._reader.close()
        self._reader.cached_offset_reader.tar_index_reader_cache.clear()

    def _unreadable(self, index: int, error: Exception) -> dict[str, Any]:
        firsts = self._reader.shard_count_cumsum
        shard = bisect_right(firsts, index) - 1
        name = self._reader.shard_infos[shard].name
        source = SourceInfo(
            dataset_path=self._reader.base_path, index=index, shard_name=name, file_names=()
        )
        return {
            "__key__": f"(sample {index - firsts[shard]} of the shard)",
            "__shard__": name,
            "__restore_key__": ("Webdataset", index),
            "__sources__": (source,),
            UNREADABLE: _said(error),
        }


def read_parts(place: SampleLocation) -> dict[str, Any]:
    """The whole record at `place`; or {UNREADABLE: reason} if it cannot be read at a second try."""
    try:
        try:
            return place.parts()
        except _LOST:
            place.shards.close()  # a passing fault of a network drive deserves a second try
            return place.parts()
    except _LOST as error:
        place.shards.close()
        return {UNREADABLE: _said(error)}


def _said(error: BaseException) -> str:
    """Text of `error` for a refusal; the text of a ShardError needs no type before it."""
    return str(error) if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"


class PlainReader:
    """Reads samples with usual tar headers from the local shards of an Energon reader."""

    def __init__(self, reader: ShardInfosITarReader, shards: OpenShards):
        self._reader = reader
        self._shards = shards
        self._paths: dict[int, str | None] = {}  # by shard; None where it is not local

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        """The record that Energon's reader would return for `index`; None if the split excludes it.

        In a large record, `.safetensors` is a RecordHeader and PLACE has the location.

        Raises:
            NotPlain: only Energon's reader can read the record.
            OSError: a file cannot be read.
        """
        shard = bisect_right(self._reader.shard_count_cumsum, index) - 1
        path = self._paths[shard] if shard in self._paths else self._local(shard)
        if path is None:
            raise NotPlain("the shard is not a local file")
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
        chosen = self._reader.sample_filter
        found = read_head(
            place,
            sample_filter=chosen and (lambda key: chosen(f"{shard}/{key}")),
            part_filter=self._reader.part_filter,
        )
        if found is None:
            return None
        key, names, parts = found
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


def read_head(
    place: SampleLocation,
    *,
    sample_filter: Callable[[str], bool] | None = None,
    part_filter: Callable[[str], bool] | None = None,
) -> tuple[str, list[str], dict[str, Any]] | None:
    """(key, file names, parts by extension) of the sample at `place`.

    The result is None if `sample_filter`, which is called with the key, excludes the sample. A part
    is bytes; in a sample of more than 8192 bytes, a part with tensors is a RecordHeader. Sounds are
    left out unless `place.shards.with_sound`. Extensions that `part_filter` excludes are left out.

    Raises:
        NotPlain: only Energon's reader can read the sample.
    """
    window = _Window(place)
    parts, names, key = {}, [], ""
    for name, at, size in sample_members(window, place.size):
        stem, extension = split_name(name)
        if not key and sample_filter is not None and not sample_filter(stem):
            return None
        key = key or stem
        if stem != key:
            raise NotPlain(f"the sample has files of two keys, {key!r} and {stem!r}")
        if is_sound(extension) and not place.shards.with_sound:
            continue
        if part_filter is None or part_filter(extension):
            whole = place.size <= _WINDOW or not has_tensors(extension)
            parts[extension] = window(at, size) if whole else _head(window, at, size, extension)
            names.append(name)
    return key, names, parts


class _Window:
    """Reads a sample's bytes in larger pieces than requested, and buffers them."""

    def __init__(self, place: SampleLocation):
        self._place = place
        self._from, self._data = 0, place.read(0, min(_WINDOW, place.size))

    def __call__(self, at: int, size: int) -> bytes:
        begin = at - self._from
        if begin < 0 or begin + size > len(self._data):
            more = min(max(size, _WINDOW), self._place.size - at)
            self._from, self._data, begin = at, self._place.read(at, more), 0
        return self._data[begin : begin + size]


def _head(window: _Window, at: int, size: int, extension: str) -> RecordHeader | bytes:
    if not has_named_tensors(extension):
        return RecordHeader(data=window(at, min(size, MLPERF_HEAD)), size=size)
    if size <= 8:
        return window(at, size)
    length = head_length(window(at, 8))
    # For a garbled length the first 8 bytes are enough; else the whole file would be read.
    return RecordHeader(data=window(at, length if length <= min(size, _LARGE) else 8), size=size)


class _Member(tarfile.TarInfo):
    """A tar member that must lie within its sample.

    Energon trusts the sizes in headers: a sparse member may claim terabytes of zeros, and a
    negative size leads back to the same header for ever.
    """

    def _proc_member(self, tar: Any) -> Self:  # tarfile calls it for every header that it reads
        self._check(tar)
        member = super()._proc_member(tar)  # type: ignore[misc]  # typeshed does not know it
        member._check(tar)  # an extended header may have said another size
        return member

    def _check(self, tar: Any) -> None:
        if self.issparse() or not 0 <= self.size <= tar.sample_end - self.offset:
            what = "sparse" if self.issparse() else f"longer ({self.size} bytes) than its sample"
            raise tarfile.ReadError(
                f"the file {self.name!r} in the tar is {what}; restore the shard, or write it again"
            )


def read_whole(reader: ShardInfosITarReader, index: int) -> dict[str, Any] | None:
    """The record `index`, read by Energon's own reader; None if the split excludes it.

    Raises:
        ValueError: a file's extension begins with `__`, and is none of Energon's own.
        Exception: of many kinds, for a damaged tar or index.
    """
    shard = bisect_right(reader.shard_count_cumsum, index) - 1
    tar, end = tar_of_sample(reader, index, shard)
    tar.tarinfo, tar.sample_end = _Member, end
    record: Any = reader[index]
    if record is None:
        return None
    if odd := [name for name in record if name.startswith("__") and name not in _OF_ENERGON]:
        raise ValueError(
            f"a file of the sample has the extension {odd[0]!r}, but extensions that begin with __"
            " are Energon's own; rename the file"
        )
    # Bytes that are no UTF-8 come as halves of surrogate pairs, which no file or log takes.
    name = record["__key__"].encode(errors="surrogateescape").decode(errors="backslashreplace")
    return {**record, "__key__": name}
