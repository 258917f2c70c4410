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

SIZE, LIMIT_S = 4, 5
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
    """Processes of a miniature run, with their children."""

    def __init__(self, fault: str, rank: int, *, launched: bool, size: int = SIZE):
        script = [str(ROOT / "tests/faulty_run.py"), fault, str(rank), str(LIMIT_S)]
        env = environment() | {"PYTHONPATH": str(ROOT)}
        if launched:
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
            calls = [([sys.executable, *start, *script], env)]
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            world = env | meeting | {"WORLD_SIZE": str(size)}
            ranks = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(size)]
            calls = [([sys.executable, *script], world | each) for each in ranks]
        self.processes = [
            subprocess.Popen(call, env=e, stderr=subprocess.PIPE, text=True) for call, e in calls
        ]
        self.family: set[psutil.Process] = set()

    def end(self) -> tuple[list[int], str]:
        """Exit codes, and what was said before the launcher's own page."""
        deadline = time.monotonic() + HANG
        while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            self.family |= _family(self.processes)
            time.sleep(0.2)
        alive = [p.pid for p in self.processes if p.poll() is None]
        assert not alive, f"{alive} hang"
        said = "".join(p.communicate()[1] for p in self.processes)
        return [p.returncode for p in self.processes], own_words(said)

    def left(self) -> list[psutil.Process]:
        """Those that are still there, after a moment for the kernel."""
        return psutil.wait_procs(self.family, timeout=10)[1]


def _family(processes: list[subprocess.Popen[str]]) -> set[psutil.Process]:
    found = set()
    for process in processes:
        try:
            parent = psutil.Process(process.pid)
            found |= {parent, *parent.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def start() -> Iterator[type[Run]]:
    runs: list[Run] = []

    def begin(*args, **kwargs) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield begin
    for process in (p for run in runs for p in (*run.family, *run.processes)):
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
    codes, said = run.end()
    assert 0 not in codes, said
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said
    assert errors[0].startswith(f"error: rank {rank} (host {socket.gethostname()}, pid "), said
    assert SAYS[fault] in errors[0] or (rank == 0 and "died or does not answer" in errors[0])
    assert not run.left()
