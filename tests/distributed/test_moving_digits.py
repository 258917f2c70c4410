"""conf/wan_moving_digits.yaml, made small, learns in two minutes which way a digit is to move."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from data_prep.cli.parser import main as data_prep
from tests.launching import ROOT, command, run

SHORT = (
    *("model.num_layers=2", "optimizer.lr=3e-3", "train.train_iters=500"),
    *("dataset.task_encoder_seq_length=1536", "dataset.packing_buffer_size=64"),
    *("dataset.shuffle_buffer_size=500", "dataset.num_workers=0", "train.eval_interval=0"),
)
"""32 clips a step; the whole file trains 2500 steps of 64."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clips_move_as_their_captions_say(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    words = ["digits", "--moving", "--num_samples", "400", "--output_dir", str(data)]
    assert data_prep(words) == 0
    conf = ("--config-file", str(ROOT / "conf/wan_moving_digits.yaml"), *SHORT)
    places = (f"dataset.path={data}", f"checkpoint.save={folder}")
    done = run(command("pretrain_dit.py", *conf, *places), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    # Guidance makes up for a short training.
    few = ("--guidance", "6", "--num_steps", "8", "--per_prompt", "2", "--min_accuracy", "0")
    script = (str(ROOT / "recipes/evaluate_digits.py"), "--moving", "--checkpoint_path")
    done = run([sys.executable, *script, str(folder), *few])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "evaluation.json").read_text())
    assert found["clips"] == 80 and found["held_out"]["direction"] == 1.0
    assert found["direction"] >= 0.6  # 0.25 by chance
