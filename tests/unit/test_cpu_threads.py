"""Threads on a CPU that other programs use, too: chosen before torch is there to read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dit.cpu_threads import SPINS, choose_threads, cpu_quota

# Ends where torch would be loaded, and says what OpenMP would read.
PROGRAM = """
import importlib, os, sys
class Torch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            os._exit(0)
sys.stdout.reconfigure(line_buffering=True)
sys.meta_path.insert(0, Torch())
importlib.import_module(sys.argv[1])
print("no torch", os.environ.get("GOMP_SPINCOUNT"))
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
    bare = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    call = [sys.executable, "-c", PROGRAM, module]
    done = subprocess.run(
        call, env=bare, cwd=repo_root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split()[-1:] == [str(SPINS)], done.stdout + done.stderr


def test_what_the_user_says_stays(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    given = {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "9"}
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
