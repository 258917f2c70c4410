"""Shards on a local disk, held open and read at offsets."""

from __future__ import annotations

import math
import os
import struct
import time

import numpy as np

_LOOK_S = 0.1  # between looks whether a shard is still there, of which each takes 10 us
_OPEN = 128  # shards. Systems allow 1024 files, some fewer
_SPAN = struct.Struct("<2Q")
BLOCK = 512  # bytes; a tar pads every header and every content to a multiple of this


class NotPlain(Exception):  # noqa: N818 - a case for Energon's reader, not a failure
    """Raised for what only a whole tar reader can read, or can say what is wrong with."""


class ShardError(ValueError):
    """A shard or its index is damaged; the message names the file."""


REINDEX = "restore it, or write it anew with `energon prepare --tar-index-only {folder}`"
"""What to do about an index; `folder` is that of the dataset."""


def index_fault(offsets: bytes) -> str:
    """What is wrong with the bytes of an index, empty for nothing.

    Each number says where a sample begins and the one before it ends, so an index that does not
    ascend would give some bytes twice, or none.
    """
    if len(offsets) % 8 or len(offsets) < 16:
        return f"it has {len(offsets)} bytes, no row of two or more 8-byte numbers"
    found = np.frombuffer(offsets, "<u8")
    if len(falls := np.flatnonzero(found[1:] <= found[:-1])):
        at = int(falls[0])
        return f"number {at + 1} is {found[at + 1]}, after {found[at]}: its numbers do not ascend"
    if len(odd := np.flatnonzero(found % BLOCK)):
        at = int(odd[0])
        return f"number {at} is {found[at]}, where no file of a tar begins (multiples of {BLOCK})"
    return ""


class OpenShard:
    """A shard and its index."""

    def __init__(self, path: str):
        """Opens both.

        Raises:
            OSError: one of them is not there.
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
            raise ShardError(f"{path}.idx is damaged: {fault}")

    def size_now(self) -> int | None:
        """Bytes of the shard; None if another file has its name by now.

        Raises:
            OSError: it has gone. Open files outlive their names, and a run that went on would not
                find them again after a stop.
        """
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked, found = now, os.stat(self.path)
            self._size = found.st_size if os.path.samestat(found, self._identity) else None
        return self._size

    def span(self, sample: int) -> tuple[int, int]:
        """Start and end of a sample in bytes.

        Raises:
            ShardError: the index has no such sample.
        """
        try:
            start, stop = _SPAN.unpack_from(self._index, 8 * sample)
        except struct.error as error:
            raise ShardError(f"{self.path}.idx has no sample {sample}") from error
        # Of the first one the start is not looked at by Energon either: folders may come before.
        return start if sample else 0, stop


class OpenShards:
    """The shards that a loader has read last, held open."""

    def __init__(self) -> None:
        self._open: dict[str, OpenShard] = {}
        self._memory = bytearray()

    def span(self, path: str, sample: int) -> tuple[int, int]:
        """Start and size in bytes of a sample of the shard."""
        shard, size = self._checked(path)
        start, stop = shard.span(sample)
        if stop > size:
            raise ShardError(
                f"{path} has {size} bytes, and by its .idx sample {sample} ends at {stop}: it is"
                " cut short, or its .idx is that of another shard"
            )
        return start, stop - start

    def read(self, path: str, start: int, size: int) -> bytes:
        """Bytes of the shard; fewer where it ends before. To follow `span`."""
        return os.pread(self._open[path].number, size, start)

    def read_again(self, path: str, start: int, size: int) -> memoryview:
        """The same at any time later, into memory that the next call writes to again.

        Memory that is new takes as long to get as to read into, and is in no cache.
        """
        shard, _ = self._checked(path)
        if len(self._memory) < size:
            self._memory = bytearray(size)  # tensors may still look at the one before
        view = memoryview(self._memory)[:size]
        return view[: os.preadv(shard.number, [view], start)]

    def close(self) -> None:
        self._open.clear()

    def _checked(self, path: str) -> tuple[OpenShard, int]:
        """The shard of that name and its size, as they are now.

        Raises:
            OSError: it is not there.
        """
        # The last one read is the last in the dictionary, so the first is closed first.
        shard = self._open.pop(path, None)
        size = None if shard is None else shard.size_now()
        while shard is None or size is None:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open)))
            shard = OpenShard(path)
            size = shard.size_now()
        self._open[path] = shard
        return shard, size
