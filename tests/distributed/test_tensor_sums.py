"""Sums over tensor ranks, on two processes."""

from __future__ import annotations

import pytest

from tests.launching import ROOT, command, run


@pytest.mark.slow
def test_what_tensor_ranks_sum_is_complete_whatever_its_strides():
    words = command("tensor_sums_worker.py", nproc=2, folder="tests/distributed")
    done = run(words, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all sums are complete" in done.stdout
