"""Atomic writes: a file appears with all of its content, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

TEMPORARY = ".tmp"
_BUFFER = 1 << 20  # bytes; without it, each small file of a tar would be a system call


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class AtomicFile:
    """A file that gets its name only when all of its content is on the disk.

    A killed process leaves `path.tmp`. `keep` continues that file behind its first `keep` bytes;
    `discard` removes it.
    """

    def __init__(self, path: Path, *, keep: int = 0):
        self.path = path
        self._temporary = path.with_name(path.name + TEMPORARY)
        self.stream = self._temporary.open("r+b" if keep else "wb", buffering=_BUFFER)
        self.stream.truncate(keep)
        self.stream.seek(keep)

    def publish(self) -> None:
        """Gives the file its name."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        self._temporary.rename(self.path)
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes what was written, unless it is published."""
        self.stream.close()
        self._temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes or replaces `path` in one step."""
    file = AtomicFile(path)
    try:
        file.stream.write(content)
        file.publish()
    finally:
        file.discard()
