"""Other processes that write to a folder while a test tries to."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from dit.safe_writing import only_writer

_FORK = multiprocessing.get_context("fork")
_SPAWN = multiprocessing.get_context("spawn")


def _hold(folder: Path, pipe: Connection) -> None:
    with only_writer(folder, named="it"):
        # As a loader's process does, this one outlives the process that holds the folder.
        child = _FORK.Process(target=time.sleep, args=(60,))
        child.start()
        pipe.send(child.pid)
        pipe.recv()
        child.kill()


@contextmanager
def held(folder: Path) -> Iterator[tuple[BaseProcess, int]]:
    """A process that writes to `folder`, and the number of a child of it."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_hold, args=(folder, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours.recv()
    finally:
        if process.is_alive():
            ours.send("end")
        process.join()
