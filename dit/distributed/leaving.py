"""How a process leaves after an error: it closes what it can within a limit, and waits for nobody.

NCCL waits for ever for what it has started with ranks that have left: its kernels, the copies after
them, and its communicators when they are destroyed. So nothing is destroyed, and no other rank is
asked for anything.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dit.parsing import cause

if TYPE_CHECKING:
    import psutil

_CLOSE_S = 30.0
"""For loggers and loaders; the launcher may give as long to the other processes."""
_ALONE_S = 120.0
"""Where one process is the whole run, which also finishes a checkpoint that is being written."""
_FLUSH_S = 2.0
_at_stake: list[str] = []


@contextmanager
def at_stake(what: str, *, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, something is finished after an error; it is named as lost where that fails."""
    _at_stake.append(what)
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the first one is on its way out, and is the cause
        say(f"{what} is lost: {cause(error)}")
    finally:
        _at_stake.remove(what)


def time_to_close() -> float:
    """Seconds that a process takes at most to close what it has open, after an error."""
    return _ALONE_S if os.environ.get("WORLD_SIZE", "1") == "1" else _CLOSE_S


def leave_after(seconds: float, code: int, *, say: Callable[[str], None]) -> threading.Timer:
    """Lets this process leave after a while, whatever it waits for then; cancel it to stay."""

    def give_up() -> None:
        for what in _at_stake:
            say(f"{what} is lost: it did not end within {seconds:.0f} s")
        if not _at_stake:
            say(f"this process waited for {seconds:.0f} s for others to end, and has left")
        leave(code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


def leave(code: int) -> None:
    """Ends this process and its children at once."""
    import psutil  # late: scripts answer --help without it

    # In a thread, because another one may hold a stream, and wait for whoever should read from it.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    kill_children(psutil.Process())
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            stream.flush()


def kill_children(process: psutil.Process) -> None:
    """Kills all descendants of a process."""
    import psutil

    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
