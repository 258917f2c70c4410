"""Errors of the operating system, provoked where root may do everything, else made by number."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dit.system_errors import explained, writing


def made(number: int, file: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([file] if file else []))


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOENT, "check the path"),
        (errno.ENOTDIR, "a part of it is a file"),
        (errno.ENAMETOOLONG, "255 bytes"),
        (errno.EACCES, "ls -ld"),
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "df -h"),
        (errno.EDQUOT, "quota -s"),
        (errno.EFBIG, "file of this size"),
        (errno.EIO, "dmesg"),
        (errno.ESTALE, "mount the folder again"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EAGAIN, "ulimit -u"),
        (errno.EADDRINUSE, "port"),
        (errno.ECONNREFUSED, "firewall"),
    ],
)
def test_file_fault_and_remedy(number: int, remedy: str) -> None:
    said = explained(made(number, "runs/a"))
    assert said.startswith(f"runs/a: {os.strerror(number)}; ")
    assert remedy in said


def test_full_shared_memory_is_named_with_its_own_remedy() -> None:
    said = explained(made(errno.ENOSPC, "/dev/shm/sem.1"))
    assert said.startswith("/dev/shm/sem.1: No space left") and "--shm-size" in said
    text = "unable to write to file </torch_1_2>: No space left on device (28), shared memory"
    assert "--shm-size" in explained(RuntimeError(text))


def test_a_write_is_explained_with_the_file_that_was_open(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    with limited(resource.RLIMIT_FSIZE, 1000), pytest.raises(OSError) as caught:
        file.write_text("x" * 10_000)
    assert caught.value.filename is None
    assert explained(caught.value).startswith(f"{file}: File too large; ")


def test_the_limit_of_a_file_is_named() -> None:
    with limited(resource.RLIMIT_FSIZE, 1000):
        assert "1,000 bytes with `ulimit -f unlimited`" in explained(made(errno.EFBIG, "a"))


def test_the_limit_of_open_files_is_named(tmp_path: Path) -> None:
    held = []
    with limited(resource.RLIMIT_NOFILE, 64), pytest.raises(OSError) as caught:
        while True:
            held.append((tmp_path / "a").open("w"))
    for file in held:
        file.close()
    said = explained(caught.value)
    assert said.startswith(f"{tmp_path / 'a'}: Too many open files; ")
    assert "ulimit -n" in said


def test_errors_of_libraries_count_by_their_text(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    with limited(resource.RLIMIT_FSIZE, 1000):
        with pytest.raises(SafetensorError) as caught:
            save_file({"a": torch.zeros(10_000)}, file)
        said = explained(caught.value, file)
    assert said.startswith(f"{file}: ") and "File too large" in said and "ulimit -f" in said
    with pytest.raises(FileNotFoundError) as missing:
        load_file(tmp_path / "b.safetensors")
    assert "check the path" in explained(missing.value)


def test_safetensors_calls_a_file_missing_that_does_not_open(tmp_path: Path) -> None:
    (file := tmp_path / "a.safetensors").write_bytes(b"")
    with limited(resource.RLIMIT_NOFILE, 0):
        error = FileNotFoundError(f"No such file or directory: {file}")
        assert explained(error).startswith(f"{file}: Too many open files; ")


def test_a_server_whose_name_is_unknown() -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert explained(error, "hub.example").startswith("hub.example: Name or service not known; ")
    assert "DNS" in explained(error)


def test_shared_memory_is_named_where_an_error_names_no_file(monkeypatch) -> None:
    """Locks of processes lie there."""
    monkeypatch.setattr("os.path.isdir", lambda _: True)
    for blocks, wanted in ((0, "/dev/shm: No space left"), (1 << 20, "No space left")):
        found = SimpleNamespace(f_bavail=blocks, f_frsize=4096)
        monkeypatch.setattr("os.statvfs", lambda _, found=found: found)
        assert explained(made(errno.ENOSPC)).startswith(wanted)


def test_errors_of_libraries_that_tell_no_number() -> None:
    assert "`ulimit -n`" in explained(RuntimeError("received 0 items of ancdata"))
    assert "df -h" in explained(RuntimeError("unexpected pos 64 vs 0"), "a.pt")


def test_the_name_reaches_another_process() -> None:
    with pytest.raises(OSError) as caught, writing(Path("shard.tar")):
        raise made(errno.ENOSPC)
    assert explained(pickle.loads(pickle.dumps(caught.value))).startswith("shard.tar: No space")


def test_other_errors_are_their_own_text() -> None:
    assert explained(ValueError("a: [Errno 28] is full")) == "a: [Errno 28] is full"
    assert explained(OSError("no regular file")) == "no regular file"
    assert explained(KeyError("a")) == "'a'"
