"""The first run on a GPU as a user types it, in tiny sizes on a CPU."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launching import ROOT, run_cold


@pytest.mark.slow
def test_parts_run_one_after_the_other_and_go_on(tmp_path):
    program = [sys.executable, str(ROOT / "benchmarks/first_gpu.py"), "--size", "tiny"]
    places = ["--output", str(tmp_path), "--keys", "model.num_layers=1 ema.kind=none"]
    done = run_cold([*program, *places, "--parts", "xl-eager ceilings 7b-profile"])
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "cpu.json").read_text())
    parts, names = content["parts"], ["imports", "ceilings", "xl-eager", "7b-profile"]
    assert list(parts) == names and {one["state"] for one in parts.values()} == {"done"}
    assert parts["xl-eager"]["found"]["step_time_s"]["median"] > 0
    assert all(isinstance(value, float) for value in parts["ceilings"]["found"].values())
    assert len(parts["7b-profile"]["found"]["longest"]) == 10
    assert "| DiT-XL | eager |" in (tmp_path / "cpu.md").read_text()
    # An error of one part, in a later run: what was done stays.
    keys = ["--parts", "7b-eager", "--limit", "200", "--keys", "model.no_such=1"]
    again = run_cold([*program, "--output", str(tmp_path), *keys])
    assert again.returncode == 1 and "model.no_such" in again.stdout
    found = json.loads((tmp_path / "cpu.json").read_text())["parts"]
    assert found["7b-eager"]["state"] == "failed" and found["xl-eager"] == parts["xl-eager"]
