"""The first run on a GPU as a user types it, in tiny sizes on a CPU."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launching import ROOT, run


@pytest.mark.slow
def test_rows_run_one_after_the_other_and_go_on(tmp_path):
    program = [sys.executable, "-m", "tools.gpu", "--size", "tiny", "--output", str(tmp_path)]
    asked = ["--keys", "model.num_layers=1 ema.kind=none", "--parts"]
    done = run([*program, *asked, "xl-eager ceilings 7b-profile smoke"], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert list(rows) == ["imports", "smoke", "ceilings", "xl-eager", "7b-profile"]
    assert {one["state"] for one in rows.values()} == {"done"}
    assert all("skipped" in said for said in rows["smoke"]["found"].values())
    assert rows["xl-eager"]["found"]["step_time_s"]["median"] > 0
    assert all(isinstance(value, float) for value in rows["ceilings"]["found"].values())
    assert len(rows["7b-profile"]["found"]["longest"]) == 10
    assert "| xl-eager | sdpa |" in (tmp_path / "cpu.md").read_text()
