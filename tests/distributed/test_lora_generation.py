"""Adapters beside a digits model: in a run, in its exports and its card, and by --lora."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli.parser import main as data_prep
from dit.config_loading import read_config
from dit.lora.factors import linear_shapes
from dit.lora.files import read_lora, write_lora
from tests.entering import Enter
from tests.launching import ROOT, SMALL, run
from tests.lora_files import random_factors

PROMPTS = ("a handwritten zero", "a handwritten seven", "a handwritten four")
LAST = "step_00000006"


@pytest.fixture(scope="module")
def runs(enter: Enter, digits: Path, tmp_path_factory) -> Path:
    """`base`, `lora` beside its average, and `other`: random adapters in a file."""
    folder = tmp_path_factory.mktemp("runs")
    common = (*SMALL, "dataset.num_workers=0", f"dataset.path={digits}")
    conf, save = ROOT / "conf/dit_digits.yaml", f"checkpoint.save={folder / 'base'}"
    steps = ("train.train_iters=40", "train.eval_interval=0", "optimizer.lr=5e-3")
    done = enter("pretrain_dit", "--config-file", conf, *common, *steps, save)
    assert done.code == 0, done.said
    before = digests(folder / "base")
    conf = ROOT / "conf/dit_digits_lora.yaml"
    places = (f"checkpoint.load={folder / 'base'}", f"checkpoint.save={folder / 'lora'}")
    steps = ("train.train_iters=6", "train.eval_interval=3", "checkpoint.save_interval=3")
    more = ("checkpoint.also_save_hf=true", "checkpoint.keep_last=2", "scheduler.lr_warmup_iters=0")
    sampled = ("validation.num_captions=3", "validation.sampling_steps=2", "optimizer.lr=3e-2")
    done = enter("pretrain_dit", "--config-file", conf, *common, *places, *steps, *more, *sampled)
    assert done.code == 0, done.said
    assert digests(folder / "base") == before
    model = read_config(folder / "lora/checkpoints" / LAST / "config.yaml").model
    (folder / "other").mkdir()
    write_lora(folder / "other", random_factors(linear_shapes(model)))
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def generate(enter: Enter, runs: Path, tmp_path_factory):
    """Pictures [N, H, W, 3] of a run with adapters of files, and what samples.json says."""

    def call(run: str, *lora: str) -> tuple[np.ndarray, list[dict]]:
        folder = tmp_path_factory.mktemp("pictures")
        asked = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
        asked += [part for file in lora for part in ("--lora", file)]
        places = ("--checkpoint_path", runs / run, "--output_dir", folder)
        done = enter("generate_dit", *places, *asked, "--num_steps", 4, "--guidance", 1)
        assert done.code == 0, done.said
        entries = json.loads((folder / "samples.json").read_text())
        made = [np.array(Image.open(folder / entry["file"])) for entry in entries]
        return np.stack(made).astype(int), entries

    return call


@pytest.mark.slow
def test_files_add_up_beside_the_base(runs: Path, generate) -> None:
    base, entries = generate("base")
    assert "lora" not in entries[0]
    file, other = str(runs / "lora/diffusers" / LAST), str(runs / "other")
    adapted, _ = generate("lora")
    assert np.abs(adapted - base).max() > 20
    found = {
        given: generate("base", *given)
        for given in (
            (file,),
            (f"{file}:0",),
            (f"{file}:0", f"{other}:0"),
            (file, f"{other}:0"),
            (f"{file}:0.25", f"{file}:0.75"),
            (f"{other}:0.5", file, f"{other}:-0.5"),
            (file, other),
        )
    }
    made = {given: pictures for given, (pictures, _) in found.items()}
    for given, (_, entries) in found.items():
        assert all(entry["lora"] == list(given) for entry in entries)
    # Scale 0 leaves no trace, to the last bit.
    assert np.array_equal(made[f"{file}:0",], base)
    assert np.array_equal(made[f"{file}:0", f"{other}:0"], base)
    assert np.array_equal(made[file, f"{other}:0"], made[file,])
    for same in (made[file,], made[f"{file}:0.25", f"{file}:0.75"]):
        assert np.abs(same - adapted).max() <= 1
    assert np.abs(made[f"{other}:0.5", file, f"{other}:-0.5"] - adapted).max() <= 1
    assert np.abs(made[file, other] - adapted).max() > 20


@pytest.mark.slow
def test_adapters_learn_dark_ink_on_white(runs: Path, digits: Path, enter: Enter, generate) -> None:
    """A majority of the pictures; conf/dit_digits_lora.yaml has the figures of the whole run."""
    before, data = digests(runs / "base"), runs / "inverted"
    words = ("--num_samples", "240", "--invert", "--whitening_from", str(digits))
    assert data_prep(["digits", "--output_dir", str(data), *words]) == 0
    places = (f"checkpoint.load={runs / 'base'}", f"checkpoint.save={runs / 'ink'}")
    more = (f"dataset.path={data}", "dataset.num_workers=0", "checkpoint.save_interval=160")
    steps = ("train.train_iters=160", "train.eval_interval=0", "optimizer.lr=2e-2")
    conf = ROOT / "conf/dit_digits_lora.yaml"
    done = enter("pretrain_dit", "--config-file", conf, *SMALL, *places, *more, *steps)
    assert done.code == 0, done.said
    assert digests(runs / "base") == before
    # Mean greys of 255, of three pictures: 114, 72 and 90, then 147, 172 and 133.
    dark, light = (generate(run)[0].mean((1, 2, 3)) for run in ("base", "ink"))
    assert dark.max() < 128 < np.median(light) and (light - dark).min() > 20


def test_each_save_exports_the_adapters_with_their_samples(runs: Path, tmp_path: Path) -> None:
    exports = runs / "lora/diffusers"
    assert sorted(one.name for one in exports.iterdir()) == ["step_00000003", LAST]
    for folder in exports.iterdir():
        card = (folder / "README.md").read_text()
        assert f"- Steps: {int(folder.name[-8:])}\n" in card and "- Data: data\n" in card
        samples = runs / "lora/validation_generation" / folder.name
        for number in range(3):
            shown = f"samples/{number:05d}.png"
            assert f"({shown})" in card
            assert (folder / shown).read_bytes() == (samples / f"{number:05d}.png").read_bytes()
        assert (samples / "without_adapter/00000.png").is_file()
    # By hand it is the same file; the two checkpoints hold other adapters.
    place = ("--megatron-path", str(runs / "lora"), "--hf-path", str(tmp_path / "again"))
    done = run([sys.executable, "-m", "dit.convert", "export-lora", *place])
    assert done.returncode == 0, done.stdout + done.stderr
    one, other, first = (
        read_lora(place)
        for place in (exports / LAST, tmp_path / "again", exports / "step_00000003")
    )
    assert one.keys() == other.keys() == first.keys() and len(one) == 2 * 16 + 4
    assert all(torch.equal(one[name].up, other[name].up) for name in one)
    assert not any(torch.equal(one[name].up, first[name].up) for name in one)
