"""Packs of a step reach a GPU without making the host wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import ROOT, environment

pytestmark = pytest.mark.gpu


def test_packs_arrive_while_ranks_compute():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "tests/sharing.py"), "cuda"],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
