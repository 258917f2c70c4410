"""Twenty losses of the debug run: a change that should alter nothing alters none of them.

`UPDATE_GOLDEN=1 python -m pytest tests/distributed/test_golden_losses.py` writes them anew.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.launching import ROOT, command, metrics, run


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["edm", "flow"])
def test_losses_are_those_of_before(tmp_path, objective):
    conf = str(ROOT / "conf/dit_debug.yaml")
    arguments = ["train.eval_interval=0", f"objective.name={objective}", "optimizer.lr=1e-3"]
    done = run(
        command("pretrain_dit.py", "--config-file", conf, f"checkpoint.save={tmp_path}", *arguments)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    got = {name: [line[name] for line in metrics(tmp_path)] for name in ("loss", "grad_norm")}
    file = ROOT / f"tests/golden/losses_dit_debug_{objective}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(json.dumps(got, indent=1) + "\n")
    golden = json.loads(file.read_text())
    assert len(golden["loss"]) == 20
    for name, values in golden.items():
        # Other processors round differently; a changed formula moves the first digits.
        assert got[name] == pytest.approx(values, rel=2e-4), name
