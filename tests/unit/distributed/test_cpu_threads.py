"""Threads on a CPU that other programs use, too: chosen before torch is there to read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dit.distributed.cpu_threads import about_threads, choose_threads, cpu_quota

# Ends where torch would be loaded, and says what OpenMP would read.
PROGRAM = """
import importlib, os, sys
class Torch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            os._exit(0)
sys.stdout.reconfigure(line_buffering=True)
sys.meta_path.insert(0, Torch())
importlib.import_module(sys.argv[1])
print("no torch", os.environ.get("OMP_WAIT_POLICY"))
"""

# Starts twice, as a program that opens one checkpoint after another.
START = """
import os
os.getloadavg = lambda: (99.0, 0.0, 0.0)
import torch
torch.set_num_threads(2)
from dit.models.dit.family import DitConfig
from dit.distributed.process_groups import start_processes
for _ in range(2):
    start_processes(seed=1, model=DitConfig())
"""


@pytest.mark.parametrize(
    "module",
    [
        "recipes.pretrain_dit",
        "recipes.generate_dit",
        "recipes.evaluate_digits",
        "recipes.decode_latents",
        "recipes.check_layouts",
        "dit.playground.studio",
        "dit.convert.cli",
        "data_prep.cli.parser",
    ],
)
def test_every_program_chooses_before_torch_is_loaded(module: str, repo_root: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    call = [sys.executable, "-c", PROGRAM, module]
    done = subprocess.run(
        call, env=bare, cwd=repo_root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split()[-1:] == ["passive"], done.stdout + done.stderr


def test_what_the_user_says_stays(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    given = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "9"}
    chosen = dict(given)
    choose_threads(chosen, tmp_path, cores=64)
    assert chosen == given


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"cpu.max": "400000 100000\n"}, 4.0, "4"),
        ({"cpu.max": "50000 100000\n"}, 0.5, "1"),
        ({"cpu.max": "max 100000\n"}, None, None),
        ({"cpu.max": "1600000 100000\n"}, 16.0, None),  # more than there are
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5, "2"),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, None),
        ({"cpu.max": "damaged"}, None, None),
        ({}, None, None),
    ],
)
def test_a_container_gets_as_many_threads_as_it_may_use(
    tmp_path: Path, files: dict[str, str], quota: float | None, threads: str | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cpu_quota(tmp_path) == quota
    chosen: dict[str, str] = {}
    choose_threads(chosen, tmp_path, cores=8)
    assert chosen.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("threads", "cores", "load", "quota", "words"),
    [
        (2, 2, 1.3, None, "2 CPU threads, on 2 cores, of which other programs use about 1.3 "),
        (4, 4, 9.0, None, "4 CPU threads, on 4 cores, of which other programs use about 4.0 "),
        (2, 2, 0.3, None, None),
        (4, 8, 4.0, None, None),  # torch has a thread for each of four cores with two halves
        (1, 2, 2.0, None, None),
        (1, 8, 0.0, 1.5, "1 CPU thread, because this container may use 1.5 of 8 cores "),
    ],
)
def test_a_start_says_that_cores_are_shared_or_limited(
    tmp_path: Path, threads: int, cores: int, load: float, quota: float | None, words: str | None
) -> None:
    limit = "max" if quota is None else f"{quota * 1e5:.0f}"
    (tmp_path / "cpu.max").write_text(f"{limit} 100000\n")
    line = about_threads(tmp_path, threads=threads, cores=cores, load=load)
    assert (line is None) == (words is None)
    assert (words or "") in (line or "")


@pytest.mark.parametrize("set_by_user", [True, False])
def test_the_line_is_left_out_where_the_user_chose(set_by_user: bool, repo_root: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    bare["CUDA_VISIBLE_DEVICES"] = ""
    call = [sys.executable, "-c", START]
    done = subprocess.run(
        call,
        env=bare | ({"OMP_NUM_THREADS": "2"} if set_by_user else {}),
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("OMP_NUM_THREADS") == (0 if set_by_user else 1), done.stderr
