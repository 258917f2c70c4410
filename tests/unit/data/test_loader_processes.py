"""Loader processes that die or are signalled: an error in seconds or nothing, never a hang."""

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.resource_sharer import DupFd
from threading import Timer

import pytest

from dit.data import DataError, build_train_loader
from dit.data.cook import Expected

DEATH = r"DataLoader worker|loader process"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def loader(shards, tmp_path, opened):
    config = shards.config(shards.good_set(tmp_path, 60), num_workers=2)
    return opened(build_train_loader(config, rank=0, world_size=1))


def pids(loader):
    return [worker.pid for worker in loader._loader._iterator._workers]


def until_gone(worker):
    while worker.is_alive():
        time.sleep(0.01)


def test_a_killed_worker_is_an_error_that_says_what_to_do(loader, shards):
    next(loader)
    # torch may raise from its signal handler at once, or from the next pack.
    with pytest.raises((DataError, RuntimeError), match=DEATH):
        os.kill(pids(loader)[1], signal.SIGKILL)
        shards.take(loader, 1000)
    with pytest.raises(DataError, match=r"loader process has died .*dataset\.num_workers"):
        for _ in range(2):
            shards.take(loader, 1000)


def test_the_state_of_a_killed_worker_is_an_error(loader):
    next(loader)
    with pytest.raises((DataError, RuntimeError), match=DEATH):
        worker = loader._loader._iterator._workers[0]
        os.kill(worker.pid, signal.SIGKILL)
        until_gone(worker)
        loader.state_dict()
    with pytest.raises(DataError, match="loader process has died"):
        loader.state_dict()


def test_a_connection_that_ends_before_its_worker_does(loader, monkeypatch):
    next(loader)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would speak first
    worker = loader._loader._iterator._workers[0]
    end = Timer(0.3, os.kill, (worker.pid, signal.SIGKILL))

    def reset():
        end.start()
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(loader._loader._iterator, "_next_data", reset)
    try:
        with pytest.raises(DataError, match="loader process has died"):
            next(loader)
    finally:
        signal.signal(signal.SIGCHLD, handler)


def test_state_before_the_first_pack_does_not_wait(loader, shards):
    start = loader.state_dict()
    iter(loader)
    assert loader.state_dict() == start
    shards.take(loader, 1)
    assert loader.state_dict()["readers"] != start["readers"]


def test_workers_outlive_the_signals_that_make_a_trainer_save(loader, shards):
    shards.take(loader, 2)  # one of each: both have begun
    for pid in pids(loader):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    shards.take(loader, 10)
    assert loader.state_dict()["readers"]


def test_close_ends_the_workers(loader):
    next(loader)
    workers = pids(loader)
    loader.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_a_trainer_that_is_killed_while_it_fetches_a_pack(
    shards, tmp_path, opened, monkeypatch, capfd
):
    """What the worker would print stood before the error that names the killed process."""
    fetch = DupFd.detach

    def break_off_first(sent):
        with socket.socket(socket.AF_UNIX) as broken:
            broken.connect(sent._id[0])
        return fetch(sent)

    monkeypatch.setattr(Expected, "pack_bytes", 100)  # no shared memory, so packs are fetched
    monkeypatch.setattr(DupFd, "detach", break_off_first)
    config = shards.config(shards.good_set(tmp_path, 60), num_workers=1)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    for _ in range(4):
        next(loader)
    loader.close()
    assert "Error" not in capfd.readouterr().err


LEAVE = """
import multiprocessing, sys
from pathlib import Path
from tests.unit.data.conftest import Shards
from dit.data import build_train_loader

def leave():
    config = Shards().config(Path(sys.argv[1]), num_workers=2)
    loader = build_train_loader(config, rank=0, world_size=1)
    next(loader)
    keep = [loader]
    keep.append(keep)  # a cycle, so that nothing is tidied before the process ends
    sys.exit(3)

child = multiprocessing.get_context("fork").Process(target=leave)
child.start()
child.join()
assert child.exitcode == 3
leave()
"""


@pytest.mark.slow
def test_a_process_that_leaves_without_closing_ends(shards, tmp_path):
    """A program, and a child of multiprocessing, which ends in another way."""
    shards.good_set(tmp_path, 60)
    script = tmp_path / "leave.py"
    script.write_text(LEAVE)
    environment = dict(os.environ, PYTHONPATH=os.getcwd(), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, timeout=50, capture_output=True
    )
    assert done.returncode == 3, done.stderr.decode()
