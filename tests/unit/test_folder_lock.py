"""A folder has one writer at a time, and is free once that writer is no more."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from dit.safe_writing import LOCK, FolderInUseError, only_writer
from tests.holding import held


def _take(folder: Path) -> None:
    with only_writer(folder, named="checkpoint.save=runs/a"):
        assert (folder / LOCK).is_file()


def test_the_second_writer_is_told_of_the_first(tmp_path):
    with held(tmp_path) as (process, _), pytest.raises(FolderInUseError) as error:
        _take(tmp_path)
    said = str(error.value)
    assert f"checkpoint.save=runs/a is in use: process {process.pid} on" in said
    assert socket.gethostname() in said
    assert str(tmp_path / LOCK) in said
    _take(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_link_to_the_folder_is_the_same_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    with held(tmp_path / "data"), pytest.raises(FolderInUseError):
        _take(tmp_path / "link")


def test_a_writer_that_was_killed_leaves_the_folder_free_though_its_child_lives_on(tmp_path):
    with held(tmp_path) as (process, child):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert psutil.pid_exists(child)
        _take(tmp_path)
        os.kill(child, signal.SIGKILL)


def test_a_writer_that_fails_leaves_the_folder_free(tmp_path):
    with pytest.raises(KeyError), only_writer(tmp_path, named="it"):
        raise KeyError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [b"", b"process 1 on gone", b"\xff" * 4096])
def test_what_a_killed_writer_left_in_the_file_is_of_no_account(tmp_path, left):
    (tmp_path / LOCK).write_bytes(left)
    _take(tmp_path)


def test_a_file_that_was_replaced_while_it_was_opened_is_not_taken_for_the_lock(
    tmp_path, monkeypatch
):
    """The holder removed the file between our opening and our locking it; ours is a new one."""
    opened, found = os.open, []

    def open_once_too_early(*args) -> int:
        handle = opened(*args)
        if not found:
            (tmp_path / LOCK).unlink()
        found.append(handle)
        return handle

    monkeypatch.setattr(os, "open", open_once_too_early)
    with only_writer(tmp_path, named="it"):
        assert (tmp_path / LOCK).stat().st_ino == os.fstat(found[-1]).st_ino
    assert len(found) == 2


def test_without_locks_a_warning_takes_their_place(tmp_path, monkeypatch, caplog):
    def none(*_args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", none)
    _take(tmp_path)
    assert f"{tmp_path} is on a file system without locks" in caplog.text
