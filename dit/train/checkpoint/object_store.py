"""Checkpoints in an object store that multi-storage-client (MSC) reaches: msc://PROFILE/run.

The store has the same names as a run folder: checkpoints/step_N/FILE, checkpoints/LATEST and
checkpoints/LOWEST_VAL. A checkpoint is complete if it has a manifest, which is written last and
removed first. Every written or fetched file is read again and compared with the manifest.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import multistorageclient as msc
from multistorageclient.types import Range, SourceVersionCheckMode

from dit.checkpoint_paths import (
    LATEST,
    LOWEST_VAL,
    MANIFEST,
    PARTIAL,
    POINTERS,
    STEP,
    CheckpointError,
    FileDigest,
    find_checkpoint,
    is_file_name,
    parse_manifest,
    sync_and_digest,
)
from dit.distributed.collective_errors import error_in_words
from dit.distributed.watchdog import heartbeat
from dit.safe_writing import sync_folder

logger = logging.getLogger(__name__)

_FOLDER = "checkpoints"
_PIECE = 16 << 20  # bytes of an object that are held in memory
_SIDE_BY_SIDE = 8  # files that are fetched at the same time
_NAME = re.compile(rf"{STEP}\d{{8,}}|{LATEST}|{LOWEST_VAL}")
_CACHE = "megatron-dit/checkpoints"


class CheckpointStore:
    """The checkpoints of one run in an object store."""

    def __init__(self, address: str):
        """Opens the store of the run at `address`; sends no request yet.

        Raises:
            CheckpointError: MSC has no such profile, or lacks a package for it.
        """
        self.address = address.rstrip("/")
        with self._explained():
            self._client, path = msc.resolve_storage_client(self.address)
        self._root = PurePosixPath(path) / _FOLDER
        self.moved = 0  # number of transfers so far; it rises while the store answers

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A context that turns the store's errors, which have many types, into CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.address} cannot be used ({error_in_words(error)}); check its profile in the"
                " file that MSC_CONFIG names, and that its bucket can be read and written"
            ) from error

    def files(self) -> dict[str, set[str]]:
        """The names of the files of each checkpoint in the store, complete or not, by its name.

        Raises:
            CheckpointError: the store does not answer.
        """
        found: dict[str, set[str]] = {}
        with self._explained():
            for one in self._client.list_recursive(str(self._root)):
                *_, name, file = PurePosixPath(one.key).parts
                if name.startswith(STEP):
                    found.setdefault(name, set()).add(file)
        return found

    def manifest(self, name: str) -> bytes | None:
        """The manifest of the checkpoint `name`, unparsed; None if the checkpoint is incomplete."""
        return self._content(f"{name}/{MANIFEST}")

    def pointer(self, name: str) -> str | None:
        """Name of the checkpoint to which `name` (LATEST or LOWEST_VAL) points, or None."""
        text = (self._content(name) or b"").decode(errors="replace").strip()
        return text if is_file_name(text) else None

    def newest(self) -> str | None:
        """Name of the checkpoint to resume from; None if there is none.

        It is the newest complete checkpoint that is not newer than the one that LATEST names; if
        there is none, or no LATEST, the newest complete one.

        Raises:
            CheckpointError: the store does not answer.
        """
        whole = sorted(name for name, files in self.files().items() if MANIFEST in files)
        latest = self.pointer(LATEST)
        before = [name for name in whole if latest is None or name <= latest]
        return next(reversed(before or whole), None)

    def put(self, folder: Path, content: bytes) -> None:
        """Copies the checkpoint in `folder` to the store, and its manifest `content` last.

        Raises:
            CheckpointError: the store's content differs from what was saved.
        """
        name, there = folder.name, self.files().get(folder.name, set())
        with self._explained():
            files = parse_manifest(content).files
            if MANIFEST in there:  # of another checkpoint of this step
                self.remove(name, [MANIFEST])
            for file, digest in files.items():
                self._put_file(folder / file, digest)
            self.remove(name, there - files.keys() - {MANIFEST})
            self._client.write(self._path(f"{name}/{MANIFEST}"), content)

    def _put_file(self, file: Path, digest: FileDigest) -> None:
        path = self._path(f"{file.parent.name}/{file.name}")
        if self._holds(path, digest):  # from a copy that was interrupted
            return
        self._client.upload_file(path, str(file))
        self.moved += 1
        if not self._holds(path, digest):
            raise CheckpointError(
                f"the copy of {file} in {self.address} differs from the file; check that no other"
                " program writes there"
            )

    def _holds(self, path: str, digest: FileDigest) -> bool:
        try:
            size = self._client.info(path).content_length
        except FileNotFoundError:
            return False
        if size != digest.bytes:
            return False
        found = hashlib.sha256()
        for piece in self._pieces(path, size):
            found.update(piece)
        return found.hexdigest() == digest.sha256

    def point(self, pointer: str, name: str) -> None:
        """Makes the `pointer` LATEST or LOWEST_VAL point to the checkpoint `name`."""
        if self.pointer(pointer) != name:
            with self._explained():
                self._client.write(self._path(pointer), name.encode())

    def remove(self, name: str, files: Iterable[str]) -> None:
        """Removes `files` of the checkpoint `name`, its manifest first."""
        with self._explained():
            for file in sorted(files, key=lambda file: file != MANIFEST):
                self._client.delete_many([self._path(f"{name}/{file}")])

    def fetch(self, name: str, into: Path) -> Path:
        """Copies the checkpoint `name` into the folder `into`, where it appears when complete.

        Raises:
            CheckpointError: the checkpoint is incomplete or damaged, or `into` cannot be written.
        """
        content = self.manifest(name)
        if content is None:
            raise CheckpointError(
                f"{self.address} has no complete copy of {name}; name another checkpoint there"
            )
        partial, target = into / f"{PARTIAL}{name}", into / name
        with self._explained():
            files = parse_manifest(content).files
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            with ThreadPoolExecutor(_SIDE_BY_SIDE) as threads:
                places = [partial / file for file in files]
                list(threads.map(self._fetch_file, places, files.values()))  # raises their errors
            (partial / MANIFEST).write_bytes(content)
            sync_and_digest(partial / MANIFEST)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            sync_folder(into)
        return target

    def _fetch_file(self, file: Path, digest: FileDigest) -> None:
        name = file.parent.name.removeprefix(PARTIAL)
        with file.open("wb") as stream:
            for piece in self._pieces(self._path(f"{name}/{file.name}"), digest.bytes):
                stream.write(piece)
                heartbeat(f"fetch of {name}")
        if sync_and_digest(file) != digest:
            raise CheckpointError(
                f"{self.address}: {name} is damaged, because its {file.name} has changed since it"
                f" was saved; remove {name}/{MANIFEST} there to resume from an earlier checkpoint"
            )

    def _pieces(self, path: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, _PIECE):
            part = Range(offset=start, size=min(_PIECE, size - start))
            yield self._client.read(path, part, SourceVersionCheckMode.ENABLE)
            self.moved += 1

    def _content(self, name: str) -> bytes | None:
        """Content of a small object; None if it does not exist."""
        with self._explained(), suppress(FileNotFoundError):
            return self._client.read(
                self._path(name), check_source_version=SourceVersionCheckMode.ENABLE
            )
        return None

    def _path(self, name: str) -> str:
        return str(self._root / name)


def fetched_checkpoint(address: str) -> Path | None:
    """Local copy of the checkpoint at `address`; None if the store has none.

    `address` is that of a run (its newest checkpoint is meant), of a checkpoint, or of its LATEST
    or LOWEST_VAL. The copy stays in ~/.cache ($XDG_CACHE_HOME), and is reused while the store has
    the same checkpoint.

    Raises:
        CheckpointError: the store does not answer, or the checkpoint is damaged.
    """
    run, _, last = address.rstrip("/").rpartition("/")
    if not _NAME.fullmatch(last):
        run, last = address.rstrip("/"), ""
    store = CheckpointStore(run.removesuffix(f"/{_FOLDER}"))
    name = store.pointer(last) if last in POINTERS else last or store.newest()
    content = store.manifest(name) if name else None
    if name is None or content is None:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / _CACHE
    folder = cache / hashlib.sha256(store.address.encode()).hexdigest()[:16]
    with _one_at_a_time(folder):
        if _same(folder / name, content):
            return folder / name
        size = sum(digest.bytes for digest in parse_manifest(content).files.values())
        logger.warning(f"copying {name} of {store.address} ({size / 1e6:,.1f} MB) to {folder}")
        return store.fetch(name, folder)


def _same(checkpoint: Path, content: bytes) -> bool:
    """Whether the local `checkpoint` is complete and has the manifest `content`."""
    with suppress(OSError, CheckpointError):
        same = (checkpoint / MANIFEST).read_bytes() == content
        return same and find_checkpoint(checkpoint) is not None
    return False


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A context that locks `folder` against other processes of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        # The system frees it when the file is closed, also where a process is killed.
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
