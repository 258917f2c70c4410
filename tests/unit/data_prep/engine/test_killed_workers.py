"""Killed at any moment, with any number of workers, a run ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tqdm.std import TqdmDefaultWriteLock, tqdm

from data_prep.engine.block_worker import BlockWorker
from data_prep.engine.processes import Processes
from data_prep.media.clips import Clip, Entry
from data_prep.refusals import Reason
from data_prep.sources.digits import Digits
from dit.codecs.text import ByteTable
from dit.codecs.vae import Pixel
from tests.launching import run
from tests.media_files import image

KILLS = int(os.environ.get("PREP_KILLS", "2"))
COUNT = 300


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(COUNT):
        image(folder / f"{index % 7}/{index}.png", 16 + 8 * (index % 5), 24, seed=index)
    for index in range(5):
        (folder / f"broken{index}.png").write_bytes(b"no picture")
    return folder


def command(pictures: Path, out: Path, workers: int) -> list[str]:
    words = ["image", "--image_dir", pictures, "--output_dir", out, "--num_workers", workers]
    words += ["--shard_size", 40, "--split", "0.7,0.2,0.1", "--text_width", 32]
    words += ["--minutes", 0]
    return [sys.executable, "-m", "data_prep", *map(str, words)]


def finish(words: list[str]) -> None:
    """A run that nobody kills; it is a fork with torch imported, where others are cold."""
    done = run(words, timeout=250)
    assert done.returncode == 0, done.stderr


def written(out: Path) -> int:
    """Bytes of samples so far."""
    total = 0
    for path in out.glob("*/*.tar*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it got its name just now
            continue
    return total


def start_of(words: list[str], repo_root: Path) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, stdout=quiet, stderr=quiet, cwd=repo_root)


def killed(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGKILL)
    return process.wait()


def kill_at(words: list[str], out: Path, size: int, repo_root: Path) -> int:
    """Kills a run once it has written `size` bytes, or after its end; returns its exit code."""
    process = start_of(words, repo_root)
    while process.poll() is None and written(out) < size:
        time.sleep(0.001)
    return killed(process)


@pytest.fixture(scope="module")
def undisturbed(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    finish(command(pictures, out, 0))
    return out


@pytest.mark.slow
def test_one_kill(
    pictures: Path, undisturbed: Path, tmp_path: Path, repo_root: Path, content_of
) -> None:
    out = tmp_path / "out"
    assert kill_at(command(pictures, out, 0), out, written(undisturbed) // 2, repo_root) == -9
    assert not (out / ".nv-meta").exists() and list(out.glob("*/*.tar.tmp"))
    finish(command(pictures, out, 2))  # and goes on with other workers
    assert content_of(out) == content_of(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("left", ["plan.jsonl.spool.tmp", "plan.jsonl.tmp"])
def test_a_kill_before_the_plan_is_whole(
    left: str, pictures: Path, undisturbed: Path, tmp_path: Path, content_of
) -> None:
    """A moment so short that kills at random seldom meet it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / left).write_text('{"half a li')
    finish(command(pictures, out, 0))
    assert content_of(out) == content_of(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_kills_at_random_moments(
    workers: int, pictures: Path, undisturbed: Path, tmp_path: Path, repo_root: Path, content_of
) -> None:
    """Two kills a run: at any time of it, then while more is written. PREP_KILLS=20 for a look."""
    moments = random.Random(workers)
    start = time.monotonic()
    finish(command(pictures, tmp_path / "whole", workers))
    duration, total, died = time.monotonic() - start, written(undisturbed), 0
    for number in range(KILLS // 2):
        out = tmp_path / str(number)
        words = command(pictures, out, workers)
        process = start_of(words, repo_root)
        time.sleep(moments.uniform(0.2, 1) * duration)
        died += killed(process) == -signal.SIGKILL
        before = written(out)
        died += kill_at(words, out, moments.randint(before, total), repo_root) == -signal.SIGKILL
        finish(words)
        assert content_of(out) == content_of(undisturbed)
    assert died >= KILLS // 2  # the others fell behind the end


class Deadly(Digits):
    """Two of the digits kill whoever reads them."""

    def read(self, entry: Entry) -> Clip:
        # A semaphore of the machine would outlive the worker, and Python would warn of it.
        assert not isinstance(tqdm.get_lock(), TqdmDefaultWriteLock)
        if entry.source in ("load_digits/17", "load_digits/40"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(entry)


@pytest.mark.slow
def test_a_file_that_kills_workers_is_refused_and_nothing_else_is_lost(
    tmp_path: Path, pack_digits
) -> None:
    codec = Pixel.of(block=2, colours=1)
    work = BlockWorker(source=Deadly(num_samples=90), codec=codec, text=ByteTable(width=16))
    lines = [entry.to_line().encode() for entry in work.source.entries]
    blocks = [tuple(lines[start : start + 12]) for start in range(0, 90, 12)]
    plain = BlockWorker(source=Digits(num_samples=90), codec=codec, text=ByteTable(width=16))
    expected = [result for block in plain.run(blocks) for result in block]
    found = [result for block in Processes(workers=2).run(work, iter(blocks)) for result in block]
    assert len(found) == 90
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if index in (17, 40):
            assert one.reason == Reason.CRASHED
        else:
            assert one.parts == other.parts


def test_an_error_of_ours_in_a_worker_reaches_the_user(tmp_path: Path) -> None:
    codec = Pixel.of(block=3, colours=1)  # 8 x 8 pixels cannot be cut into 3 x 3
    work = BlockWorker(source=Digits(num_samples=9), codec=codec, text=ByteTable(width=16))
    block = tuple(entry.to_line().encode() for entry in work.source.entries)
    with pytest.raises(RuntimeError, match="pixel_unshuffle"):
        list(Processes(workers=1).run(work, [block]))
