"""Attention of one row of tokens to another, both shared out over two context ranks."""

from __future__ import annotations

import pytest

from tests.launching import ROOT, command, run


@pytest.mark.slow
def test_ranks_that_share_two_rows_attend_as_one():
    """A sample without keys, one without queries; outputs and gradients, both exchanges."""
    words = command("across_worker.py", nproc=2, folder="tests/distributed")
    done = run(words, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both rows attend as on one rank" in done.stdout
