"""Writes files and folders so that neither a crash nor a second program damages them.

1. Atomic writes: a file appears with all of its content, or not at all. 2. A lock on a folder, so
that one program at a time writes to it.

The lock is a POSIX lock on the file `.lock` in the folder: the operating system releases it when
the process ends, for whatever reason, and child processes do not inherit it. On NFS the server
keeps the lock for all machines (version 4, or version 3 with its lock service); the lock of a lost
machine expires with its lease, after about 90 seconds. On a file system without locks the program
only logs a warning.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Self

from dit.system_errors import name_written, reason, writing

TEMPORARY = ".tmp"
_BUFFER = 1 << 20  # bytes; without it, each small file of a tar would be a system call
LOCK = ".lock"

logger = logging.getLogger(__name__)

_HELD = (errno.EACCES, errno.EAGAIN)
_LONGEST = 300  # bytes of the file that are shown
_ADVICE = (
    "End that process or wait until it ends, or choose another folder. The lock ends with its"
    " process; if the machine of that process was lost, its file server may keep the lock for"
    " minutes: remove {file} then"
)


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class AtomicFile:
    """A file that gets its name only when all of its content is on the disk.

    A killed process leaves `path.tmp`. `keep` continues that file after its first `keep` bytes;
    `discard` removes it.
    """

    def __init__(self, path: Path, *, keep: int = 0):
        self.path = path
        self._temporary = path.with_name(path.name + TEMPORARY)
        self.stream = self._temporary.open("r+b" if keep else "wb", buffering=_BUFFER)
        self.stream.truncate(keep)
        self.stream.seek(keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, *_: object) -> None:
        """Publishes the file, or after an exception discards it."""
        if isinstance(error, OSError):
            name_written(error, self.path)
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()

    def publish(self) -> None:
        """Writes the file through to the disk, and gives it its name."""
        with writing(self.path):
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
        self._temporary.rename(self.path)
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes what was written, unless the file is published."""
        self.stream.close()
        self._temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` to `path`, or replaces its content, in one step."""
    with AtomicFile(path) as file:
        file.stream.write(content)


class FolderInUseError(ValueError):
    """Another process writes to the folder; the message names that process."""


@contextmanager
def only_writer(folder: Path, *, named: str) -> Iterator[None]:
    """A context that holds the lock of `folder`, so that no other process writes to it.

    `named` is what errors call the folder. On a file system without locks it only logs a warning. A
    process may hold the lock once, and must not open the lock file elsewhere: POSIX releases the
    lock as soon as any handle of the file is closed.

    Raises:
        FolderInUseError: another process holds the lock.
        OSError: the lock file cannot be opened.
    """
    file = folder / LOCK
    handle = _open(file, named)
    try:
        yield
    finally:
        # Removed before the lock is released, so that the next process creates a new file.
        with suppress(OSError):
            if _is_still(file, handle):
                file.unlink()
        os.close(handle)


def check_no_writer(folder: Path, *, named: str) -> None:
    """Checks that no other process writes to `folder`, by taking its lock for a moment.

    A folder without a lock file has no writer; this function creates no such file.

    Raises:
        FolderInUseError: another process holds the lock.
        OSError: the lock file cannot be opened.
    """
    file = folder / LOCK
    if file.exists():
        handle = os.open(file, os.O_RDWR)
        try:
            _lock(handle, file, named)
        finally:
            os.close(handle)


def _open(file: Path, named: str) -> int:
    """An open handle of `file` that holds its lock."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle, file, named)
        except BaseException:
            os.close(handle)
            raise
        if _is_still(file, handle):
            return handle
        os.close(handle)  # its former holder removed the file in the meantime; try again


def _lock(handle: int, file: Path, named: str) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise FolderInUseError(
                f"{named} is in use: {_holder(handle)} writes to it. {_ADVICE.format(file=file)}"
            ) from None
        logger.warning(
            f"{file.parent} is on a file system without locks ({reason(error)}): do not start a"
            " second program that writes to it, because nothing would notice it"
        )
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    with suppress(OSError):  # a full disk: the lock holds with an empty file, too
        os.ftruncate(handle, 0)
        os.pwrite(
            handle, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0
        )


def _holder(handle: int) -> str:
    """What the process that holds the lock wrote about itself into the file of `handle`."""
    said = os.pread(handle, _LONGEST, 0).decode(errors="replace")
    return "".join(filter(str.isprintable, said)) or "another process"


def _is_still(file: Path, handle: int) -> bool:
    """Whether `handle` belongs to the file that is at the path `file` now."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except FileNotFoundError:
        return False
