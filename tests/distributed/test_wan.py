"""conf/wan_debug.yaml on synthetic samples, with sparse attention: it goes on bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.launching import ROOT, command, metrics, numbers, run, stored_tensors

SHORT = (
    *("train.train_iters=4", "train.eval_interval=2", "checkpoint.save_interval=2"),
    *("train.global_batch_size=2", "train.eval_iters=1", "logger.log_interval=1"),
    # Of 80, 60, 40 and 40% of the cubes in the four steps.
    *("model.sparse_attention=true", "model.sparse_share=0.4"),
    *("model.sparse_share_step=0.2", "model.sparse_share_interval=1"),
)


def _train(folder: Path, *changes: str) -> str:
    conf = ("--config-file", str(ROOT / "conf/wan_debug.yaml"), "--mock")
    settings = (*conf, *SHORT, f"checkpoint.save={folder}", *changes)
    done = run(command("pretrain_dit.py", *settings))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_debug_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    alone, again = tmp_path / "alone", tmp_path / "again"
    _train(alone)
    lines = metrics(alone)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all("val_loss" in lines[i] for i in (1, 3))
    assert [line["sparse_share"] for line in lines] == [0.8, 0.6, 0.4, 0.4]
    # Nothing but the head learns from its zeros in the first step.
    assert lines[0]["grad_norm_cross_attention"] == 0 < lines[-1]["grad_norm_cross_attention"]
    shutil.copytree(alone, again)
    shutil.rmtree(again / "checkpoints/step_00000004")
    (again / "checkpoints/LATEST").write_text("step_00000002")
    assert "continuing after step 2" in _train(again)
    assert numbers(again) == numbers(alone)
    assert stored_tensors(again) == stored_tensors(alone)
