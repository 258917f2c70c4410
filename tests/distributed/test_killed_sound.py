"""A killed run with frames and sound goes on to the bit, and on other ranks with equal draws."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.killing import Moment, kill
from tests.launching import ROOT, command, metrics, numbers, run
from tests.stored import assert_same_stored

LAST, SAVED = 6, 3
RUN = (
    *("--config-file", str(ROOT / "conf/sound_dit_debug.yaml"), "model.num_layers=2"),
    *(f"train.train_iters={LAST}", f"checkpoint.save_interval={SAVED}", "checkpoint.keep_last=0"),
    *("train.eval_interval=0", "train.global_batch_size=2", f"logger.log_interval={LAST - SAVED}"),
    *("objective.given_text_dropout=0.5", "optimizer.kind=muon"),
)
TWO = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")


def _line(folder: Path, *more: str, nproc: int = 1) -> list[str]:
    line = command("pretrain_dit.py", *RUN, f"checkpoint.save={folder}", *more, nproc=nproc)
    script = line.index(str(ROOT / "recipes/pretrain_dit.py"))
    return line if nproc > 1 else [sys.executable, *line[script:]]


def _train(folder: Path, *more: str, nproc: int = 1) -> str:
    done = run(_line(folder, *more, nproc=nproc))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_with_sound_goes_on_here_and_on_other_ranks(tmp_path: Path) -> None:
    whole, here, elsewhere = (tmp_path / name for name in ("whole", "here", "elsewhere"))
    _train(whole)
    assert kill(_line(here), here, Moment(step=SAVED + 1, phase="step", seconds=0))
    assert (here / "checkpoints/LATEST").read_text() == f"step_{SAVED:08d}"
    shutil.copytree(here, elsewhere)
    assert f"continuing after step {SAVED}" in _train(here)
    assert numbers(here) == numbers(whole)
    last = f"checkpoints/step_{LAST:08d}"
    assert_same_stored(here / last, whole / last)
    assert f"continuing after step {SAVED}" in _train(elsewhere, *TWO, nproc=2)
    pairs = [*zip(metrics(whole)[SAVED:], metrics(elsewhere)[SAVED:], strict=True)]
    assert {"loss_video", "loss_sound", "sound_share"} <= pairs[-1][0].keys()
    for one, two in pairs:
        for name in ("consumed_samples", "sound_share"):
            assert two.get(name) == one.get(name), name
        for name in one:
            if "loss" in name or name.endswith("norm"):
                assert two[name] == pytest.approx(one[name], rel=1e-5), (one["step"], name)
