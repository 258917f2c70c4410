"""A launcher that is killed before its ranks have met takes them with it, wherever they are."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launching import ROOT, environment

SIZE, HANG = 4, 120
"""Seconds within which all are there, and all are gone; both take about as long as imports."""


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    launcher = subprocess.Popen(
        [sys.executable, *start, str(ROOT / "tests/orphans.py"), str(tmp_path)],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + HANG
        while not all((tmp_path / str(rank)).exists() for rank in range(SIZE)):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(ranks) == SIZE + 1
        launcher.kill()
        launcher.wait()
        (tmp_path / "go").touch()
        _, alive = psutil.wait_procs(ranks, timeout=HANG)
        assert not alive
    finally:
        launcher.kill()
        for process in ranks:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    said = launcher.communicate()[1]
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said  # of rank 0, for all of its machine
    assert (
        "died or was killed" in errors[0]
        and "Start the run again with the same command" in errors[0]
    )
