"""Weights in shares of data ranks (`ddp.sharding=weights`) give the numbers of one process."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launching import ROOT, run

LAYOUTS = {2: ("fsdp", "dp2+fsdp", "dp2+fsdp+frozen")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_tensor_is_that_of_one_process(tmp_path, ranks):
    numbers = tmp_path / "numbers.json"
    flags = ["--nproc", str(ranks), "--output", str(numbers), "--layouts", *LAYOUTS[ranks]]
    script = str(ROOT / "recipes/check_layouts.py")
    done = run([sys.executable, script, *flags, "objective.name=edm"], timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [one for one in json.loads(numbers.read_text()) if "fsdp" in one["layout"]]
    assert [one["layout"] for one in found] == [*LAYOUTS[ranks]]
    for one in found:
        assert max(one["steps"].values()) <= 1e-5
        for kind in ("gradient", "weight"):
            assert max(one["tensors"][kind].values()) <= 1e-5
