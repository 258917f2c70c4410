"""A file that is written atomically appears whole, or stays as it was."""

from pathlib import Path

import pytest

from dit.safe_writing import TEMPORARY, AtomicFile, write_atomically


def test_a_file_keeps_its_old_content_until_the_new_one_is_published(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")
    file = AtomicFile(path)
    file.stream.write(b"new")
    assert path.read_bytes() == b"old"
    file.publish()
    assert path.read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_is_discarded_leaves_nothing(tmp_path: Path) -> None:
    file = AtomicFile(tmp_path / "a")
    file.stream.write(b"half")
    file.discard()
    assert not list(tmp_path.iterdir())


def test_a_killed_write_is_continued_behind_the_bytes_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / f"a{TEMPORARY}").write_bytes(b"whole|torn")
    file = AtomicFile(tmp_path / "a", keep=6)
    file.stream.write(b"rest")
    file.publish()
    assert (tmp_path / "a").read_bytes() == b"whole|rest"


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a"]
