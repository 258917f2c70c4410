"""LTX-2 with sound on a layout of all kinds of ranks, beside one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import ROOT, command, own_words, run

SHORT = ("model.num_layers=2", "validation.quantiles=1", "train.global_batch_size=2")


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_both_streams_train_as_on_one_process(tmp_path: Path) -> None:
    """Every second sample has a sound; two widths travel between stages."""
    words = command("sound_layouts.py", nproc=8, folder="tests/distributed")
    words += ["--family", "ltx2.3", "--layouts", "tp2+sp+cp2+pp2", *SHORT]
    words += ["--output", str(tmp_path / "x.json")]
    done = run(words, timeout=1500, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + own_words(done.stderr)
    one, all_ranks = json.loads((tmp_path / "x.json").read_text())
    assert all_ranks["layout"] == "tp2+sp+cp2+pp2" and not all_ranks["faults"]
    gradients = one["tensors"]["gradient"]
    assert {"sound_in.patches.weight", "sound_proj_out.weight"} <= gradients.keys()
    assert all_ranks["losses"] == pytest.approx(one["losses"], rel=1e-5)
