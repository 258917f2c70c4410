"""A run on an empty disk goes on from its mirror, and commands read what lies there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.killing import Moment, kill
from tests.launching import ROOT, SMALL, command, numbers, run
from tests.stored import assert_same_stored

CONFIG = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL, "dataset.num_workers=0")
CONFIG += ("train.eval_interval=0", "scheduler.lr_warmup_iters=0", "checkpoint.save_interval=1")
CONFIG += ("scheduler.lr_decay_iters=10", "train.global_batch_size=2")
CODE = """
import os, shutil, sys
from dit.convert.cli import main as convert
from tests.entering import enter

def pretrain(save, *words):
    done = enter("pretrain_dit", *sys.argv[1:], f"checkpoint.save={save}", *words)
    assert done.code == 0, done.said
    return done.said

def generate(checkpoint, out):
    made = ("--output_dir", out, "--prompt", "x", "--num_steps", "2")
    done = enter("generate_dit", "--checkpoint_path", checkpoint, *made)
    assert done.code == 0, done.said

mirror = "checkpoint.mirror=msc://end-to-end/run"
pretrain("whole", "train.train_iters=4")
said = pretrain("run", mirror, "train.train_iters=2")
assert "copied step_00000002 to msc://end-to-end/run in" in said, said
assert "waiting until msc://end-to-end/run has all checkpoints" in said, said
generate("run", "local")
shutil.rmtree("run")
generate("msc://end-to-end/run", "mirrored")
paths = ["--megatron-path", "msc://end-to-end/run/checkpoints/LATEST", "--hf-path", "hf"]
assert convert(["export", *paths]) == convert(["verify", *paths]) == 0
assert "refused" not in pretrain("run", mirror, "train.train_iters=4", "--dry-run")
said = pretrain("run", mirror, "train.train_iters=4")
assert "fetched step_00000002 from msc://end-to-end/run" in said, said
assert "continuing after step 2" in said, said
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A profile of MSC whose store is a folder."""
    provider = {"type": "file", "options": {"base_path": str(tmp_path / "store")}}
    profiles = {"profiles": {"end-to-end": {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(profiles))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    return {"MSC_CONFIG": str(tmp_path / "msc.json"), **cache}


def test_a_run_on_an_empty_disk_goes_on_as_if_nothing_had_happened(
    digits: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    words = [sys.executable, "-c", CODE, *CONFIG, f"dataset.path={digits}"]
    done = run(words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")[2:]
    last = "checkpoints/step_00000004"
    for place in ("run", "store/run"):
        assert_same_stored(tmp_path / place / last, tmp_path / "whole" / last)
    pictures = [(tmp_path / made / "00000.png").read_bytes() for made in ("local", "mirrored")]
    assert pictures[0].partition(b"IDAT")[2] == pictures[1].partition(b"IDAT")[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_is_killed_and_loses_its_disk_equals_the_one_that_was_never_killed(
    digits: Path, tmp_path: Path, environment, monkeypatch: pytest.MonkeyPatch, nproc: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    steps = ("train.train_iters=8", f"dataset.path={digits}")

    def words(folder: Path, *more: str) -> list[str]:
        save = f"checkpoint.save={folder}"
        line = command("pretrain_dit.py", *CONFIG, *steps, save, *more, nproc=nproc)
        alone = line.index(str(ROOT / "recipes/pretrain_dit.py"))  # without a launcher
        return [sys.executable, *line[alone:]] if nproc == 1 else line

    whole, mirror = tmp_path / "whole", "checkpoint.mirror=msc://end-to-end/run"
    done = run(words(whole))
    assert done.returncode == 0, done.stdout + done.stderr
    for disk, seconds in enumerate((0.0, 0.3, 0.05)[: 4 - nproc]):
        moment = Moment(step=2 + 2 * disk, phase=None, seconds=seconds)
        kill(words(tmp_path / f"disk_{disk}", mirror), tmp_path / f"disk_{disk}", moment)
    done = run(words(tmp_path / "last", mirror))
    assert done.returncode == 0 and "fetched step_" in done.stdout, done.stdout + done.stderr
    went_on = numbers(tmp_path / "last")
    assert went_on == numbers(whole)[-len(went_on) :]
    for place in ("last", "store/run"):
        last = "checkpoints/step_00000008"
        assert_same_stored(tmp_path / place / last, whole / last)
