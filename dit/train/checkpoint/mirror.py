"""Mirror of a run (`checkpoint.mirror`): copies of finished checkpoints in an object store.

1. restored   a run on an empty disk gets the newest checkpoint of its mirror
2. Mirror     after each save, a thread of the first rank copies the new checkpoint

`to_fetch` tells a dry run which checkpoint a start would fetch. The store keeps as many checkpoints
as the run folder (`checkpoint.keep_last`, and the one with the lowest validation loss). A start
without a local checkpoint fails if the store cannot be read. Later errors of the store do not end
the run: they are logged and counted, and the copy is tried again at the next save and at the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dit.checkpoint_paths import (
    LATEST,
    LOWEST_VAL,
    MANIFEST,
    POINTERS,
    CheckpointError,
    find_checkpoint,
    saved_checkpoints,
)
from dit.config import CheckpointConfig, RunConfig
from dit.distributed.collective_errors import error_in_words
from dit.distributed.watchdog import heartbeat
from dit.progress import counted
from dit.safe_writing import write_atomically
from dit.system_errors import explained

if TYPE_CHECKING:
    from dit.train.checkpoint.object_store import CheckpointStore

_LATER = "the run goes on, and tries again at its next save and at its end"
_POLL_S = 0.05


def restored(checkpoint: CheckpointConfig) -> list[str]:
    """Fetches the newest checkpoint of the mirror into a run folder that has none.

    Returns lines for the start of the log. The first rank calls it.

    Raises:
        CheckpointError: the mirror cannot be used, so it is unknown whether it has a checkpoint.
    """
    c = checkpoint
    if not c.mirror or not c.save:
        return []
    store, own = _store(c.mirror), find_checkpoint(Path(c.save))
    if own is not None:
        return _about_mirror(store, own)
    name = store.newest()
    if name is None:
        return []
    heartbeat(f"fetch of {name}")
    began, checkpoints = time.perf_counter(), Path(c.save) / "checkpoints"
    store.fetch(name, checkpoints)
    try:
        for pointer in POINTERS:
            if pointer == LATEST or store.pointer(pointer) == name:
                write_atomically(checkpoints / pointer, name.encode())
    except OSError as error:
        raise CheckpointError(
            f"{checkpoints} cannot be written ({explained(error)}); choose another checkpoint.save"
        ) from error
    return [f"fetched {name} from {c.mirror} in {time.perf_counter() - began:.1f} s"]


def to_fetch(checkpoint: CheckpointConfig) -> str | None:
    """Name of the checkpoint that `restored` would fetch; None without mirror, or with a local one.

    Raises:
        CheckpointError: the mirror cannot be used, so it is unknown whether it has a checkpoint.
    """
    c = checkpoint
    if not c.mirror or not c.save:
        return None
    store = _store(c.mirror)
    return store.newest() if find_checkpoint(Path(c.save)) is None else None


def _store(address: str) -> CheckpointStore:
    # Imported only by runs with a mirror, because other runs need not have its packages.
    from dit.train.checkpoint.object_store import CheckpointStore

    return CheckpointStore(address)


def _about_mirror(store: CheckpointStore, own: Path) -> list[str]:
    try:
        newest = store.newest()
    except CheckpointError as error:
        return [f"checkpoint.mirror: {error}; {_LATER}"]
    if newest is None or newest <= own.name:
        return []
    return [
        f"{store.address} has {newest}, but this run goes on from {own.name} in checkpoint.save; to"
        " go on from the newer one, set checkpoint.save to a folder without checkpoints"
    ]


class Mirror:
    """Copies the checkpoints of a run to an object store, in a thread."""

    def __init__(self, config: RunConfig):
        """Opens the store; raises CheckpointError if MSC lacks its profile or a package for it."""
        c = config.checkpoint
        assert c.mirror and c.save
        self.store, self.keep_last = _store(c.mirror), c.keep_last
        self.checkpoints = Path(c.save) / "checkpoints"
        self.failures = self.failures_in_a_row = 0
        self._lines: deque[str] = deque()
        self._lock, self._again = threading.Lock(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts a thread that copies missing checkpoints; if one runs, it also copies new ones."""
        with self._lock:
            if self._thread is not None:
                self._again = True
                return
            # A daemon thread, because a store that never answers must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()

    def lines(self) -> Iterator[str]:
        """Yields the log messages since the last call, and removes them."""
        while self._lines:
            yield self._lines.popleft()

    @property
    def copying(self) -> bool:
        return self._thread is not None

    def finish(self, *, patience_s: float) -> None:
        """Waits until the store has all checkpoints, and repeats copies that failed before.

        Gives up after `patience_s` seconds without progress.
        """
        self.start()
        moved, since = self.store.moved, time.monotonic()
        while self.copying and time.monotonic() - since < patience_s:
            time.sleep(_POLL_S)
            if self.store.moved != moved:
                moved, since = self.store.moved, time.monotonic()
                heartbeat(f"copy to {self.store.address}")
        failed = f"{counted(self.failures, 'attempt')} failed in this run"
        if self.copying or self.failures_in_a_row:
            why = "it does not answer" if self.copying else failed
            self._lines.append(
                f"{self.store.address} lacks checkpoints of {self.checkpoints} ({why}); run the"
                " same command again to copy them"
            )
        elif self.failures:
            self._lines.append(f"{self.store.address} has all checkpoints; {failed}")

    def _run(self) -> None:
        while True:
            try:
                self._synchronise()
                self.failures_in_a_row = 0
            except Exception as error:  # noqa: BLE001 - nothing here may end the run
                self._fail(error)
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.failures_in_a_row += 1
        said = str(error) if isinstance(error, CheckpointError) else error_in_words(error)
        self._lines.append(f"not copied ({self.failures_in_a_row} in a row): {said}; {_LATER}")

    def _synchronise(self) -> None:
        """Copies missing checkpoints, newest first; then removes those beyond `keep_last`."""
        while local := self._local():
            lacking = [name for name in local if self.store.manifest(name) != local[name]]
            self._point({name: local[name] for name in local.keys() - lacking})
            if not lacking:
                self._prune(local)
                return
            self._copy(max(lacking), local[max(lacking)])

    def _local(self) -> dict[str, bytes]:
        """The manifests of the checkpoints in the run folder, by name.

        A checkpoint that a save removes meanwhile is left out.
        """
        found = {}
        for path in saved_checkpoints(self.checkpoints):
            with suppress(FileNotFoundError):
                found[path.name] = (path / MANIFEST).read_bytes()
        return found

    def _copy(self, name: str, content: bytes) -> None:
        began = time.perf_counter()
        try:
            self.store.put(self.checkpoints / name, content)
        except CheckpointError:
            if self._local().get(name) == content:
                raise
            return  # a save has removed or replaced it in the meantime
        seconds = time.perf_counter() - began
        self._lines.append(f"copied {name} to {self.store.address} in {seconds:.1f} s")

    def _point(self, there: Iterable[str]) -> None:
        for pointer in POINTERS:
            with suppress(FileNotFoundError):
                name = (self.checkpoints / pointer).read_text(errors="replace").strip()
                if name in there:
                    self.store.point(pointer, name)

    def _prune(self, local: Iterable[str]) -> None:
        """Removes copies beyond `keep_last`, and incomplete ones.

        Complete copies that are newer than those in the run folder (`local`) stay.
        """
        files, newest = self.store.files(), max(local)
        done = sorted(n for n, there in files.items() if MANIFEST in there and n <= newest)
        kept = {*local, *(done[-self.keep_last :] if self.keep_last else done)}
        kept |= {self.store.pointer(LOWEST_VAL)}
        for name, there in files.items():
            if name not in kept and (name <= newest or MANIFEST not in there):
                self.store.remove(name, there)
