"""conf/dit_digits_lora.yaml, made small, learns in a minute to write dark ink on white."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from data_prep.cli.parser import main as data_prep
from tests.launching import ROOT, command, run

SMALL = (
    *("model.num_layers=3", "model.hidden_size=64", "model.num_attention_heads=2"),
    *("model.adaln_lora_dim=16", "dataset.task_encoder_seq_length=1024"),
    *("dataset.packing_buffer_size=128", "dataset.num_workers=0", "train.eval_interval=0"),
    *("validation.num_captions=0", "logger.log_interval=50"),
)
"""64 digits a step and a sixteenth of the weights."""


def train(conf: str, data: Path, save: Path, *more: str) -> None:
    words = ("--config-file", str(ROOT / "conf" / conf), *SMALL, *more)
    done = run(
        command("pretrain_dit.py", *words, f"dataset.path={data}", f"checkpoint.save={save}")
    )
    assert done.returncode == 0, done.stdout + done.stderr


def judged(checkpoint: Path, *more: str) -> dict:
    few = ("--guidance", "2", "--num_steps", "8", "--per_prompt", "10", "--min_accuracy", "0")
    script = str(ROOT / "recipes/evaluate_digits.py")
    done = run([sys.executable, script, "--checkpoint_path", str(checkpoint), *few, *more])
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((checkpoint / "evaluation.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_turn_light_ink_into_dark(tmp_path: Path) -> None:
    plain, inverted, base, lora = (tmp_path / n for n in ("plain", "inverted", "base", "lora"))
    assert data_prep(["digits", "--output_dir", str(plain)]) == 0
    like = ["--invert", "--whitening_from", str(plain)]
    assert data_prep(["digits", "--output_dir", str(inverted), *like]) == 0
    train("dit_digits.yaml", plain, base, "train.train_iters=300", "optimizer.lr=5e-3")
    before = digest(base)
    places = (f"checkpoint.load={base}", "train.train_iters=150")
    train("dit_digits_lora.yaml", inverted, lora, *places)
    assert digest(base) == before
    told = json.loads((lora / "checkpoints/step_00000150/lora.json").read_text())
    assert told["base"]["path"] == str(base / "checkpoints/step_00000300")
    found, of_base = judged(lora, "--inverted"), judged(base, "--inverted")
    assert found["light"] >= 0.9 and of_base["light"] == 0
    assert found["accuracy"] >= 0.6 and of_base["accuracy"] < 0.4  # 0.1 by chance


def digest(folder: Path) -> str:
    """Of all weights that a run has saved."""
    sums = hashlib.sha256()
    for file in sorted((folder / "checkpoints").rglob("*.distcp")):
        sums.update(file.read_bytes())
    return sums.hexdigest()
