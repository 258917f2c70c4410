"""Two packings in one output folder: the second ends at once, and the first is unharmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.cli.parser import main
from tests.holding import held
from tests.media_files import image


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for index in range(40):
        image(tmp_path / f"in/{index}.png", 16 + 8 * (index % 4), 16, seed=index)
    return tmp_path / "in"


def _image(pictures: Path, out: Path, *more: str) -> list[str]:
    words = ["image", "--image_dir", pictures, "--output_dir", out, "--text_width", "16", *more]
    return list(map(str, words))


def _is_held(lock: Path) -> bool:
    return lock.exists() and lock.stat().st_size > 0


@pytest.mark.parametrize(
    "words",
    [
        ["image", "--image_dir", "in", "--text_width", "16"],
        ["image", "--image_dir", "in", "--text_width", "16", "--overwrite"],
        ["image", "--image_dir", "in", "--text_width", "16", "--plan"],
        ["digits", "--num_samples", "20", "--overwrite"],
        ["convert", "in"],
    ],
    ids=" ".join,
)
def test_the_second_is_refused_and_changes_nothing(
    pictures: Path, tmp_path: Path, monkeypatch, capfd, words
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(_image(pictures, tmp_path / "out")) == 0
    before = {path: path.stat() for path in (tmp_path / "out").rglob("*") if path.name != ".lock"}
    with held(tmp_path / "out") as (process, _):
        assert main([*words, "--output_dir", "out"]) == 1
        said = capfd.readouterr().err
        after = {p: p.stat() for p in (tmp_path / "out").rglob("*") if p.name != ".lock"}
    assert f"error: --output_dir out is in use: process {process.pid} on" in said
    assert "Traceback" not in said
    assert before.keys() == after.keys()
    files = [path for path in after if path.is_file()]
    assert [after[f].st_mtime_ns for f in files] == [before[f].st_mtime_ns for f in files]


def test_a_folder_that_nothing_was_written_to_goes_again(tmp_path: Path, capfd) -> None:
    (tmp_path / "in").mkdir()
    assert main(_image(tmp_path / "in", tmp_path / "out")) == 1
    assert not (tmp_path / "out").exists()


def test_a_packing_that_was_killed_goes_on_at_once(
    pictures: Path, tmp_path: Path, repo_root: Path, capfd, content_of
) -> None:
    """While the first is held up, the second is refused; then the first is killed."""
    out, words = tmp_path / "out", _image(pictures, tmp_path / "out", "--num_workers", "0")
    with subprocess.Popen(
        [sys.executable, "-m", "data_prep", *words],
        cwd=repo_root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as first:
        while first.poll() is None and not _is_held(out / ".lock"):
            time.sleep(0.001)
        os.kill(first.pid, signal.SIGSTOP)
        try:
            assert main(words) == 1
        finally:
            first.kill()
        assert f"process {first.pid} on" in capfd.readouterr().err
    assert main(words) == 0
    assert not (out / ".lock").exists()
    assert main(_image(pictures, tmp_path / "other", "--num_workers", "0")) == 0
    assert content_of(out) == content_of(tmp_path / "other")
