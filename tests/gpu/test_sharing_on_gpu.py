"""Packs of a step reach a GPU without making the host wait for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launching import ROOT, environment

pytestmark = pytest.mark.gpu


def test_packs_arrive_while_ranks_compute():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Packages may lie in a folder of that path as well: `make gpu` installs wheels into one.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "tests/sharing.py"), "cuda"],
        env=environment() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
