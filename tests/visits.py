"""A short run on pictures of a tiny VAE, and where its decoder was at each round of samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tests.families import pipeline_parts
from tests.launching import ROOT, SMALL, run


def rounds_of_a_run(folder: Path) -> tuple[list[str], list[tuple[int, list[str], int]]]:
    """What the decoder did before the first round; memory before, doings, memory after of each."""
    data, notes = _packed(folder), folder / "notes.jsonl"
    script = [sys.executable, str(ROOT / "tests/watched_decoder.py"), str(notes)]
    sizes = ["model.in_channels=4", "model.patch_spatial=2", "model.crossattn_emb_size=16"]
    asked = ["train.train_iters=4", "train.eval_interval=2", "train.eval_iters=1"]
    asked += ["dataset.num_workers=0", "validation.sampling_steps=1", f"dataset.path={data}"]
    conf = ["--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL, *sizes, *asked]
    done = run([*script, *conf, "validation.num_captions=3", f"checkpoint.save={folder / 'run'}"])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = iter([json.loads(line) for line in notes.read_text().splitlines()])
    opening, before = _until_number(lines)
    found = []
    while before is not None:
        doings, after = _until_number(lines)
        assert after is not None
        found.append((before, doings, after))
        between, before = _until_number(lines)
        assert between == []
    return opening, found


def _until_number(lines: Iterator[str | int]) -> tuple[list[str], int | None]:
    words: list[str] = []
    for line in lines:
        if isinstance(line, int):
            return words, line
        words.append(line)
    return words, None


def _packed(folder: Path) -> Path:
    pictures = folder / "pictures"
    pictures.mkdir()
    for number in range(30):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / f"a_picture_{number}.png")
    model = pipeline_parts.flux(folder / "flux")
    packing = ["image", "--image_dir", pictures, "--processor", "flux", "--model_name", model]
    packing += ["--num_workers", 0, "--split", "0.7,0.3,0", "--output_dir", folder / "data"]
    packing += ["--minutes", 0]  # no run is fitted to them
    done = run([sys.executable, "-m", "data_prep", *map(str, packing)])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "data"
