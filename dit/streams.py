"""Standard output and standard error, whose failures do not end a program.

If a stream can no longer be written, because its reader has ended, its disk is full, its terminal
is gone or it was closed from the start, the other one replaces it and reports that, also at the
end. If both fail, lines are lost.

A command prints its requested output inside `result`; there, a failed write is an error.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from dit.system_errors import explained

_NAMES = {1: "standard output", 2: "standard error"}


class ResultError(ValueError):
    """A command has no result: it cannot be printed, or the command cannot begin."""


def with_streams(main: Callable[[], int]) -> int:
    """Calls `main` with streams that never fail; returns its exit code, or 1 after a `ResultError`.

    In a folder that was deleted it only reports that: relative paths mean nothing there, and MKL
    would end the process when it is loaded.
    """
    keep_streams()
    try:
        if not _has_folder():
            raise ResultError(
                "the folder in which this command was started was deleted, or is no longer mounted;"
                " `cd` into a folder that exists, and start it again"
            )
        return main()
    except ResultError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        last_words()


def _has_folder() -> bool:
    try:
        os.getcwd()
    except OSError as error:  # other errors mean that it exists, but may not be read
        return not isinstance(error, FileNotFoundError)
    return True


def keep_streams() -> None:
    """Makes writes to `sys.stdout` and `sys.stderr` never fail, except in a notebook."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or _is_kept(stream):
            continue
        kept = _closed(number) if stream is None else _kept(number, stream)
        setattr(sys, name, kept)
        setattr(sys, f"__{name}__", kept)


@contextmanager
def result() -> Iterator[None]:
    """A context in which a command prints its result to standard output.

    A reader that ends early, such as `head`, is no error.

    Raises:
        ResultError: standard output cannot be written.
    """
    flush()
    _State.result = True
    try:
        yield
        flush()
    finally:
        _State.result = False
    if _State.place[1] == 1 and (failure := _State.failed.pop(1, None)):
        number, said = failure
        if number != errno.EPIPE:
            raise ResultError(said)


def flush() -> None:
    """Writes out the buffered lines of both streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # not kept by keep_streams, or closed
            stream.flush()


def last_words() -> None:
    """Repeats, as the last line of a program, which stream has failed."""
    flush()
    for number, (_, said) in _State.failed.items():
        _say(_State.place[number], f"note: lines are missing: {said}")


class _State:
    place: ClassVar = {1: 1, 2: 2}
    """File number to which each stream writes: its own, or the other stream's."""
    failed: ClassVar[dict[int, tuple[int, str]]] = {}
    """File number of a stream -> error number and text of its first error."""
    result = False
    lock = threading.RLock()


class _Stream(io.FileIO):
    """A standard stream without errors: bytes that cannot be written are dropped."""

    def __init__(self, number: int):
        super().__init__(number, "wb", closefd=False)

    def write(self, data: Any, /) -> int:
        while True:
            try:
                written = super().write(data)
            except OSError as error:
                if not _replaced(self.fileno(), error):
                    return len(data)
                continue
            if written is not None:
                return written
            select.select([], [self], [])  # it does not block, and its reader is slow


def _replaced(number: int, error: OSError) -> bool:
    """Replaces the stream `number`, whose write failed with `error`, by the other stream.

    Returns True if it did. Returns False if the other stream has failed too, or if the stream is
    standard output within `result`: the next write tries the same file again, because its disk may
    have space by then.
    """
    with _State.lock:
        failing = _State.place[number]
        said = explained(error, _NAMES[failing])
        _State.failed.setdefault(failing, (error.errno or 0, said))
        other = 3 - failing
        if other in _State.failed or (_State.result and failing == 1):
            return False
        os.dup2(other, failing)
        _State.place[failing] = other
        _say(other, f"note: {said}. Its lines follow here, and the program goes on")
        return True


def _say(number: int, line: str) -> None:
    """Writes `line` to the file `number` unbuffered: the stream may be in the middle of a write."""
    try:
        os.write(number, (b"\n" * os.isatty(number)) + f"{line}\n".encode(errors="replace"))
    except OSError as error:
        _replaced(number, error)


def _is_kept(stream: Any) -> bool:
    return isinstance(getattr(getattr(stream, "buffer", None), "raw", None), _Stream)


def _kept(number: int, stream: io.TextIOWrapper) -> io.TextIOWrapper:
    with suppress(OSError):
        stream.flush()
    at_once = stream.line_buffering or stream.write_through
    return _text(number, at_once, encoding=stream.encoding, errors=stream.errors or "strict")


def _closed(number: int) -> io.TextIOWrapper:
    """A stream in place of the closed one `number`; its writes fail, and go to the other stream.

    It occupies the file number `number`. Otherwise the next opened file would get that number, and
    other code would write lines into that file. If a file has the number already, lines are lost.
    """
    try:
        os.fstat(number)
    except OSError:
        nothing = os.open(os.devnull, os.O_RDONLY)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)
        return _text(number, True)
    return open(os.devnull, "w")  # a file has it already


def _text(
    number: int, at_once: bool, *, encoding: str = "utf-8", errors: str = "backslashreplace"
) -> io.TextIOWrapper:
    content = io.BufferedWriter(_Stream(number))
    return io.TextIOWrapper(content, encoding, errors, newline="\n", line_buffering=at_once)
