"""Samples -> tar shards with their indices, each appearing whole.

A shard's bytes depend on its samples alone: no times, no user names.
"""

from __future__ import annotations

import json
import zlib
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import safetensors.torch
from torch import Tensor
from webdataset.writer import TarWriter

from data_prep.files import WholeFile, write_whole

_BLOCK = 512  # bytes; a tar pads every header and every content to a multiple of this


def sample_parts(tensors: dict[str, Tensor], description: dict[str, Any]) -> dict[str, bytes]:
    """The two files of a sample; the description carries a checksum of the tensors."""
    payload = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()})
    checked = {**description, "crc32": {"safetensors": f"{zlib.crc32(payload):08x}"}}
    return {"safetensors": payload, "json": json.dumps(checked).encode()}


def _tar_size(parts: dict[str, bytes]) -> int:
    return sum(_BLOCK - len(content) // -_BLOCK * _BLOCK for content in parts.values())


class _Shard:
    """A tar that is being written, and where in it each sample ends."""

    def __init__(self, path: Path):
        self.path, self.ends = path, [0]
        self._file = WholeFile(path)
        self._tar = TarWriter(self._file.stream, encoder=False, mtime=0, compress=False)

    def write(self, key: str, parts: dict[str, bytes]) -> None:
        self._tar.write({"__key__": key, **parts})
        self.ends.append(self._tar.tarstream.offset)

    def publish(self) -> None:
        self._tar.close()
        # The index first, so that a shard that can be seen always has one.
        index = self.path.with_suffix(".tar.idx")
        write_whole(index, np.array(self.ends, np.uint64).tobytes())
        self._file.publish()

    def discard(self) -> None:
        with suppress(OSError):  # the disk may be full; a tar left open complains at exit
            self._tar.close()
        self._file.discard()


class ShardSeries(AbstractContextManager):
    """Writes `shard-000000.tar`, `shard-000001.tar`, ... into one folder.

    Leaving the context publishes the last shard, or throws it away after an exception.
    """

    def __init__(self, folder: Path, *, max_samples: int, max_bytes: int):
        self.folder, self.counts = folder, dict[str, int]()  # samples of each published shard
        self.bytes_written = 0
        self._max_samples, self._max_bytes = max_samples, max_bytes
        self._shard: _Shard | None = None

    def write(self, key: str, parts: dict[str, bytes]) -> None:
        """Adds one sample, whole, in a new shard where it does not fit the open one."""
        if self._shard is not None and self._is_full(self._shard, _tar_size(parts)):
            self._publish()
        if self._shard is None:
            self.folder.mkdir(exist_ok=True)
            self._shard = _Shard(self.folder / f"shard-{len(self.counts):06d}.tar")
        self._shard.write(key, parts)

    def _is_full(self, shard: _Shard, size: int) -> bool:
        end_of_archive = 2 * _BLOCK
        samples, used = len(shard.ends) - 1, shard.ends[-1]
        return samples >= self._max_samples or used + size + end_of_archive > self._max_bytes

    def _publish(self) -> None:
        if self._shard is None:
            return
        path = self._shard.path
        self._shard.publish()
        self.counts[path.name] = len(self._shard.ends) - 1
        self.bytes_written += path.stat().st_size
        self._shard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            if self._shard is not None:
                self._shard.discard()
