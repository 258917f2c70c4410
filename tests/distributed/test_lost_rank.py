"""A rank that dies, stops or hangs ends the others, who name it; nothing stays behind."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.launching import ROOT, environment, own_words

SIZE, LIMIT_S = 3, 5
HANG = 240
"""Seconds within which a broken run has to be gone, most of which its start takes."""
SAYS = {
    "kill": "died; last seen at ",
    "stop": "gave no sign of life for 5 s",
    "hang": "made no progress for 5 s (dist.distributed_timeout_minutes=0.0833333): read of packs"
    " of step 20",
}
SAYS["late"] = SAYS["hang"]


class Run:
    """A miniature run and the processes that it has started."""

    def __init__(self, fault: str, rank: int, *, launched: bool):
        script = [str(ROOT / "tests/faulty_run.py"), fault, str(rank), str(LIMIT_S)]
        env = environment() | {"PYTHONPATH": str(ROOT)}
        if launched:
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            start, env = [], env | {"WORLD_SIZE": str(SIZE)}
        self.process = subprocess.Popen(
            [sys.executable, *start, *script], env=env, stderr=subprocess.PIPE, text=True
        )
        self.family: set[psutil.Process] = set()

    def end(self) -> tuple[int, str]:
        """Its exit code, 0 if a rank's is 0, and what was said before the launcher's page."""
        deadline = time.monotonic() + HANG
        while self.process.poll() is None and time.monotonic() < deadline:
            self.family |= _family(self.process)
            time.sleep(0.2)
        assert self.process.poll() is not None, f"{self.process.pid} hangs"
        return self.process.returncode, own_words(self.process.communicate()[1])

    def left(self) -> list[psutil.Process]:
        """Those that are still there, after a moment for the kernel."""
        return psutil.wait_procs(self.family, timeout=10)[1]


def _family(process: subprocess.Popen[str]) -> set[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return {parent, *parent.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


@pytest.fixture
def start() -> Iterator[type[Run]]:
    runs: list[Run] = []

    def begin(*args, **kwargs) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield begin
    for process in (p for run in runs for p in (*run.family, run.process)):
        if psutil.pid_exists(process.pid):
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "launched", "ranks"),
    [
        ("kill", True, range(SIZE)),
        ("stop", True, range(SIZE)),
        ("kill", False, [0]),  # the rank with the store, which is lost with it,
        ("stop", False, [0]),  # or answers no more
        ("stop", False, range(1, SIZE)),
        ("hang", False, range(1, SIZE)),
        ("late", False, range(2, SIZE)),  # rank 1 hears of it after rank 0 is done with it
    ],
)
def test_the_rank_is_named_and_nothing_is_left(start, fault, launched, ranks):
    rank = random.choice(ranks)
    run = start(fault, rank, launched=launched)
    code, said = run.end()
    assert code != 0, said
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said
    assert errors[0].startswith(f"error: rank {rank} (host {socket.gethostname()}, pid "), said
    assert SAYS[fault] in errors[0] or (rank == 0 and "died or does not answer" in errors[0])
    assert not run.left()
