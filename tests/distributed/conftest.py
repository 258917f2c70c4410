"""Digits that several tests train on, and a process that calls entry scripts for them."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from tests.entering import Enter, Outcome
from tests.entering import enter as call_script
from tests.launching import run

HANG = 300
"""Seconds after which a command that takes a few is taken to hang."""


Once = Callable[[str, Callable[[Path], object]], Path]
"""(name, function that fills a folder) -> the folder, filled once for all of pytest's workers."""


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id: str) -> Once:
    """For launches of minutes: the tests of one file may be shared out to several workers."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent

    def filled(name: str, fill: Callable[[Path], object]) -> Path:
        with FileLock(root / f"{name}.lock"):
            folder, done = root / name, root / name / ".done"
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def digits(once) -> Path:
    """240 real digits, packed by the command that users type."""

    def pack(folder: Path) -> None:
        packing = ["-m", "data_prep", "digits", "--num_samples", "240", "--output_dir"]
        done = run([sys.executable, *packing, str(folder / "data")])
        assert done.returncode == 0, done.stderr

    return once("digits", pack) / "data"


@pytest.fixture(scope="session")
def enter() -> Iterator[Enter]:
    """Calls entry scripts one after another in one process that is not pytest's."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:

        def call(script: str, *arguments: object) -> Outcome:
            asked = pool.submit(call_script, script, *map(str, arguments))
            try:
                return asked.result(timeout=HANG)
            except TimeoutError:
                for process in pool._processes.values():  # else pytest's own end waits for it
                    process.kill()
                raise

        yield call
