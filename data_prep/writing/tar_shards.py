"""Writes samples to tar shards with their indices; a shard appears only when it is complete.

The bytes of a shard depend only on its samples: it holds no times and no user names. A shard that
is being written already has its final bytes up to the last sample, so a killed run continues it.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
from torch import Tensor

from dit.codecs.sound import sound_part
from dit.safe_writing import TEMPORARY, AtomicFile, write_atomically
from dit.system_errors import writing

_BLOCK = 512  # bytes; a tar pads each header and each content to a multiple of this
_END = bytes(2 * _BLOCK)


def sample_parts(
    tensors: dict[str, Tensor], description: dict[str, Any], sound_KA: Tensor | None = None
) -> dict[str, bytes]:
    """The files of a sample by their ending: its tensors, its description, and its sound if given.

    The description gets a checksum (CRC-32) of each file of tensors.
    """
    groups = {"safetensors": tensors}
    if sound_KA is not None:
        groups[sound_part.PART] = {"latent": sound_KA}
    payloads = {
        part: safetensors.torch.save({name: t.contiguous() for name, t in group.items()})
        for part, group in groups.items()
    }
    sums = {part: f"{zlib.crc32(payload):08x}" for part, payload in payloads.items()}
    return {**payloads, "json": json.dumps({**description, "crc32": sums}).encode()}


def tar_members(key: str, parts: dict[str, bytes]) -> bytes:
    """The bytes of a sample in a tar: for each of its files a header and the padded content."""
    pieces = []
    for part in sorted(parts):
        content = parts[part]
        member = tarfile.TarInfo(f"{key}.{part}")
        member.size, member.mode = len(content), 0o444
        padding = bytes(-len(content) % _BLOCK)
        pieces += [member.tobuf(tarfile.USTAR_FORMAT), content, padding]
    return b"".join(pieces)


class SampleEnd(NamedTuple):
    """The shard of a sample, and the byte offset at which the sample ends in it."""

    shard: str  # file name
    end: int  # bytes


class _Shard:
    """A tar that is being written, and the byte offset at which each sample ends."""

    def __init__(self, path: Path, ends: list[int] | None = None):
        self.path, self.ends = path, ends or [0]
        self._file = AtomicFile(path, keep=self.ends[-1])

    def write(self, members: bytes) -> None:
        with writing(self.path):
            self._file.stream.write(members)
        self.ends.append(self.ends[-1] + len(members))

    def flush(self) -> None:
        with writing(self.path):
            self._file.stream.flush()

    def close(self) -> None:
        self._file.stream.close()

    def publish(self) -> int:
        """Completes archive and index under their final names; returns the size in bytes."""
        size = self.ends[-1] + len(_END)
        padding = bytes(-size % tarfile.RECORDSIZE)
        with writing(self.path):
            self._file.stream.write(_END + padding)
        # The index first, so that every visible shard has one.
        index = self.path.with_suffix(".tar.idx")
        write_atomically(index, np.array(self.ends, np.uint64).tobytes())
        self._file.publish()
        return size + len(padding)


class ShardSeries(AbstractContextManager["ShardSeries"]):
    """Writes `shard-000000.tar`, `shard-000001.tar`, ... into one folder.

    The end of the context publishes the last shard; after an exception its temporary file is kept
    for `resume`.
    """

    def __init__(self, folder: Path, *, max_samples: int, max_bytes: int, prefix: str = "shard-"):
        self.folder, self.counts = folder, dict[str, int]()  # samples of each published shard
        self._max_samples, self._max_bytes, self._prefix = max_samples, max_bytes, prefix
        self._shard: _Shard | None = None

    def resume(self, counts: dict[str, int], ends: list[int]) -> None:
        """Continues a series that was interrupted; call it before the first `write`.

        `counts` has the number of samples of each complete shard. `ends` has 0 and the byte offset
        of the end of each sample in the shard after those, which is continued. All later bytes and
        shards are removed.
        """
        self.counts = dict(counts)
        name = self._name(len(counts))
        for path in self.folder.glob(f"{self._prefix}*"):
            if path.name.split(".")[0] + ".tar" > name:
                path.unlink()
        path = self.folder / name
        path.with_suffix(".tar.idx").unlink(missing_ok=True)
        if path.exists():
            path.rename(path.with_name(path.name + TEMPORARY))
        if len(ends) > 1:
            self._shard = _Shard(path, ends)
        else:
            path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)

    def write(self, key: str, parts: dict[str, bytes]) -> SampleEnd:
        """Adds a sample, in a new shard if the open one is full; returns its shard and its end.

        `parts` are the files of the sample by ending.
        """
        return self.copy(tar_members(key, parts))

    def copy(self, members: bytes) -> SampleEnd:
        """Adds a sample, given as the bytes of its tar members; returns its shard and its end."""
        if self._shard is not None and self._is_full(self._shard, len(members)):
            self._publish()
        if self._shard is None:
            self.folder.mkdir(exist_ok=True)
            self._shard = _Shard(self.folder / self._name(len(self.counts)))
        self._shard.write(members)
        return SampleEnd(self._shard.path.name, self._shard.ends[-1])

    def flush(self) -> None:
        """Hands all bytes to the operating system, so that they outlive this process."""
        if self._shard is not None:
            self._shard.flush()

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:06d}.tar"

    def _is_full(self, shard: _Shard, size: int) -> bool:
        samples, used = len(shard.ends) - 1, shard.ends[-1]
        return samples >= self._max_samples or used + size + len(_END) > self._max_bytes

    def _publish(self) -> None:
        if self._shard is not None:
            self._shard.publish()
            self.counts[self._shard.path.name] = len(self._shard.ends) - 1
            self._shard = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._publish()
        elif self._shard is not None:
            self._shard.close()
