"""Errors of the operating system as messages: the file, what is wrong with it, and the remedy.

A table has the remedy for each kind of error. An error that names no file, such as that of a write,
gets the file that the failing function had open.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

SHARED_MEMORY = "/dev/shm"
_LITTLE = 1 << 20  # bytes; a file system with fewer is full

_RIGHTS = "let the user of this process have it (`ls -ld` shows its rights), or name another path"
_NOT_THERE = "its file system cannot do this; name a path on another one"
_GONE = "the device, or its file server, is gone: connect or mount it again"
_NO_ANSWER = "check its address, whether the server runs, and whether a firewall is between"


def _space(file: str) -> str:
    if file == SHARED_MEMORY or file.startswith(f"{SHARED_MEMORY}/"):
        return (
            "shared memory is full: start the container with more (--shm-size 16g, or --ipc host),"
            " or fewer loader processes"
        )
    return "free space on its disk (`df -h`, and `df -i` for the number of files) or choose another"


def _open_files(_file: str) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "" if hard in (soft, resource.RLIM_INFINITY) else f"; {hard:,} is the most it takes"
    return f"raise the limit of {soft:,} with `ulimit -n` before the command{most}"


def _file_size(_file: str) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return "its file system takes no file of this size; name a path on another one"
    return f"raise the limit of {soft:,} bytes with `ulimit -f unlimited` before the command"


# Numbers of errors, and what to do; a function is given the file's name.
_TABLE: list[tuple[tuple[int, ...], str | Callable[[str], str]]] = [
    # the path
    ((errno.ENOENT,), "check the path"),
    ((errno.ENOTDIR,), "check the path: a part of it is a file, where a folder must be"),
    ((errno.EISDIR,), "it is a folder; name a file"),
    ((errno.ENAMETOOLONG,), "shorten it: a name has at most 255 bytes, a path 4,095"),
    ((errno.ELOOP,), "its symbolic links lead in a circle; remove one of them"),
    ((errno.EEXIST, errno.ENOTEMPTY), "remove it, or name another path"),
    ((errno.EXDEV,), "both paths must lie on one file system; name others"),
    ((errno.EACCES, errno.EPERM), _RIGHTS),
    ((errno.EROFS,), "its file system is mounted read-only; name a path on another one"),
    # the disk
    ((errno.ENOSPC,), _space),
    (
        (errno.EDQUOT,),
        "your quota there is used up (`quota -s`); remove files or choose another disk",
    ),
    ((errno.EFBIG,), _file_size),
    (
        (errno.EIO, errno.EUCLEAN, errno.EREMOTEIO),
        "its disk fails (`dmesg` says more); use another",
    ),
    ((errno.ENXIO, errno.ENODEV, errno.ENOTCONN, errno.ENOMEDIUM), _GONE),
    ((errno.ESTALE,), "the file server has replaced it: mount the folder again, and start again"),
    ((errno.EBUSY, errno.ETXTBSY), "another program uses it; end that one, or name another path"),
    (
        (errno.ENOLCK,),
        "its file server cannot lock files; start its lock service, or name a path elsewhere",
    ),
    ((errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOTTY), _NOT_THERE),
    # the limits of processes
    ((errno.EMFILE,), _open_files),
    ((errno.ENFILE,), "all programs together have too many files open; raise fs.file-max"),
    ((errno.EAGAIN,), "too many processes or threads: raise `ulimit -u`, or the container's limit"),
    ((errno.ENOMEM, errno.ENOBUFS), "memory is full; end other programs, or do less at a time"),
    ((errno.E2BIG,), "shorten the command line or the environment"),
    ((errno.ENOEXEC,), "it is not a program for this machine's processor; install the one that is"),
    # streams and the network
    ((errno.EPIPE,), "whoever read it has ended; write to a file instead of a pipe"),
    ((errno.EBADF,), "it is closed; do not close it (`>&-`) for this command"),
    ((errno.EADDRINUSE,), "another program has this port; end that one, or choose another port"),
    ((errno.EADDRNOTAVAIL,), "this machine has no such address; choose one that it has"),
    ((socket.EAI_NONAME, socket.EAI_AGAIN), "check the name of the server, and this network's DNS"),
    (
        (
            *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT),
            *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        ),
        _NO_ANSWER,
    ),
]
_REMEDIES = {number: remedy for numbers, remedy in _TABLE for number in numbers}
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EROFS)
# How safetensors, Arrow, torch's sockets and its shared memory put the number into a message.
_IN_TEXT = re.compile(
    r"\(os error (\d+)\)|\[[Ee]rrno (\d+)\]|, code: -(\d+)|: [A-Z][\w /-]+ \((\d+)\)"
)
_ONLY_TEXT = {
    "items of ancdata": errno.EMFILE,  # multiprocessing, which passes open files on
    "unexpected pos": errno.ENOSPC,  # torch.save
}


def explained(error: BaseException, file: object = "") -> str:
    """An error of the system as "FILE: what is wrong; remedy"; any other error as its text.

    `file` is used if the error has no name. An error of a library counts as one of the system if
    its text has an error number.
    """
    place, said = _place_and_reason(error, str(file))
    return f"{place}: {said}" if place not in said else said


def reason(error: BaseException) -> str:
    """The text of `error`: what is wrong and the remedy, without the name of the file."""
    return _place_and_reason(error, "")[1]


def _place_and_reason(error: BaseException, file: str) -> tuple[str, str]:
    error = _opened_again(error)
    if not (number := system_number(error)):
        return "", str(error)
    if isinstance(error, OSError) and error.errno == number:
        said = error.strerror or os.strerror(number)
        place = _named(error) or file or _open_file(error) or _full_place(number)
    else:
        said = str(error)
        place = SHARED_MEMORY if "shared memory" in said else file
    remedy = _REMEDIES.get(number, "`man errno` has more about it")
    return place, f"{said}; {remedy if isinstance(remedy, str) else remedy(place)}"


def system_number(error: BaseException) -> int:
    """The number of the system error that `error` is or quotes; 0 if there is none.

    It is 0 for a ValueError too: one of this project has the explanation in its text already.
    """
    if isinstance(error, OSError) and (error.errno in _REMEDIES or error.errno in errno.errorcode):
        return error.errno or 0
    if isinstance(error, ValueError):  # one of ours has been explained
        return 0
    said = str(error)
    if found := _IN_TEXT.search(said):
        return int(next(filter(None, found.groups())))
    return next((number for text, number in _ONLY_TEXT.items() if text in said), 0)


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """A context that adds `file` to an error of a write that names no file."""
    try:
        yield
    except OSError as error:
        name_written(error, file)
        raise


def name_written(error: OSError, file: Path) -> None:
    """Adds the name of `file` to `error`, if it is an error of a write that names no file."""
    if error.errno in _OF_WRITING and error.filename is None:
        error.filename = str(file)


def _opened_again(error: BaseException) -> BaseException:
    """Opens the file of `error` again, and returns the new error; `error` itself if that succeeds.

    safetensors reports every file that it cannot open as missing, and neither its error nor Arrow's
    has a number; the new error has one.
    """
    if isinstance(error, FileNotFoundError) and error.errno is None:
        try:
            os.close(os.open(str(error).rpartition(": ")[2], os.O_RDONLY))
        except (OSError, ValueError) as again:
            return again
    return error


def _named(error: OSError) -> str:
    names = [
        os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, str | bytes)
    ]
    return " -> ".join(names)


def _open_file(error: OSError) -> str:
    """Name of the file that the innermost function with an open file had; "" if there is none."""
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        for value in frame.f_locals.values():
            if not isinstance(value, io.IOBase):
                continue
            name, mode = getattr(value, "name", None), getattr(value, "mode", "")
            writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            if isinstance(name, str) and (writes or error.errno not in _OF_WRITING):
                return name
    return ""


def _full_place(number: int) -> str:
    """Path of shared memory if it is full, else empty; errors about it name no file."""
    if number != errno.ENOSPC or not os.path.isdir(SHARED_MEMORY):
        return ""
    found = os.statvfs(SHARED_MEMORY)
    return SHARED_MEMORY if found.f_bavail * found.f_frsize < _LITTLE else ""
