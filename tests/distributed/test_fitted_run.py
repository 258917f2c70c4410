"""Own pictures from end to end: packed, fitted, trained by train.yaml, and judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dit.config_loading.load import read_config
from tests.launching import ROOT, run

pytestmark = pytest.mark.slow


def call(*words: object) -> str:
    done = run([sys.executable, *map(str, words)], timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(2400)
def test_drawings_are_packed_fitted_trained_and_judged(tmp_path: Path) -> None:
    source, data = tmp_path / "drawings", tmp_path / "data"
    source.mkdir()
    for number in range(30):
        picture = np.full((32, 32, 4), 0, np.uint8)  # transparent but for a bar
        picture[number : number + 3, 4:28] = (8 * number, 250 - 8 * number, 90, 255)
        Image.fromarray(picture, "RGBA").save(source / f"{number}.png")
        (source / f"{number}.txt").write_text(f"bar number {number}")
    said = call(
        "-m", "data_prep", "image", "--image_dir", source, "--output_dir", data,
        "--minutes", "0.5",
    )  # fmt: skip
    assert "packed: " in said and "fitted: " in said
    assert said.splitlines()[-1].endswith(f"--config-file {data / 'train.yaml'}")
    call("-m", "dit.fitting", data, "--minutes", "0.4")
    script = ROOT / "recipes"
    call(
        script / "pretrain_dit.py", "--config-file", data / "train.yaml",
        "train.train_iters=4", "scheduler.lr_warmup_iters=1", "validation.num_captions=2",
        "validation.sampling_steps=2",
    )  # fmt: skip
    folder = tmp_path / "data_run"  # beside the data, as the file says
    judged = call(
        script / "evaluate_pictures.py", "--checkpoint_path", folder, "--count", 8,
        "--num_steps", 2,
    )  # fmt: skip
    config = read_config(folder / "config.yaml")
    guidance = config.validation.guidance or 2.5  # 1 where the time is for 140 passes
    assert f"8 captions of training pictures, guidance {guidance:g}" in judged
    found = json.loads((folder / "evaluation.json").read_text())
    assert found["training_pictures"] >= 25 and found["even"] > 0.3  # white where transparent
    assert 0 < found["white"] < 1 and found["settings"]["guidance"] == guidance
    assert config.train.train_iters == 4
    # Packing again with other pictures takes the file away together with the dataset.
    (source / "30.png").write_bytes((source / "0.png").read_bytes())
    (source / "30.txt").write_text("bar number 30")
    call(
        "-m", "data_prep", "image", "--image_dir", source, "--output_dir", data,
        "--overwrite", "--minutes", "0",
    )  # fmt: skip
    assert not (data / "train.yaml").exists() and folder.is_dir()
