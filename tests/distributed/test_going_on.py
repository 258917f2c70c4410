"""What a run goes on from, as users type it: other settings, damage, the weights of another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entering import Enter, Outcome
from tests.holding import held
from tests.launching import ROOT, SMALL, metrics


@pytest.fixture
def pretrain(enter: Enter, digits: Path):
    """Trains into a folder, with changes to the configuration."""

    def call(folder: Path, *changes: str) -> Outcome:
        config = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL)
        places = (f"dataset.path={digits}", f"checkpoint.save={folder}", "dataset.num_workers=0")
        steps = ("train.train_iters=2", "checkpoint.save_interval=1", "train.eval_interval=0")
        steps += ("scheduler.lr_warmup_iters=0",)
        return enter("pretrain_dit", *config, *places, *steps, *changes)

    return call


def _said(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.said
    return outcome.said


def test_what_has_changed_is_said_when_a_run_goes_on(pretrain, tmp_path):
    _said(pretrain(tmp_path))
    changes = ("train.train_iters=3", "optimizer.lr=1e-3", "train.global_batch_size=2")
    said = _said(pretrain(tmp_path, *changes))
    assert "continuing after step 2" in said
    assert "changed since then: train.train_iters 2 -> 3, train.global_batch_size 1 -> 2," in said
    assert "optimizer.lr 0.002 -> 0.001" in said
    assert len(metrics(tmp_path)) == 3


def test_a_new_run_starts_from_weights_once(pretrain, tmp_path):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    _said(pretrain(base))
    new = (f"checkpoint.load={base}", "checkpoint.finetune=true", "objective.name=flow")
    said = _said(pretrain(tuned, *new, "rng.seed=7", "ema.kind=none"))
    assert f"starting at step 0 from the weights of {base}/checkpoints/step_00000002" in said
    assert 'objective.name "edm" -> "flow"' in said
    assert [line["step"] for line in metrics(tuned)] == [1, 2]
    assert metrics(tuned)[-1]["consumed_samples"] == metrics(base)[-1]["consumed_samples"]
    said = _said(pretrain(tuned, *new, "rng.seed=7", "ema.kind=none", "train.train_iters=3"))
    assert "continuing after step 2" in said
    assert len(metrics(tuned)) == 3


def test_weights_that_are_not_there_or_do_not_fit_are_refused(pretrain, tmp_path):
    nothing = (f"checkpoint.load={tmp_path}/nothing", "checkpoint.finetune=true")
    said = pretrain(tmp_path / "tuned", *nothing).error()
    assert f"checkpoint.load={tmp_path}/nothing holds no checkpoint" in said
    _said(pretrain(tmp_path / "base"))
    base = (f"checkpoint.load={tmp_path}/base", "checkpoint.finetune=true")
    said = pretrain(tmp_path / "tuned", *base, "model.num_layers=3").error()
    assert "model.num_layers: 2 in the checkpoint, 3 here" in said


def test_a_run_to_continue_that_is_not_there_is_said(pretrain, tmp_path):
    said = _said(pretrain(tmp_path / "new", f"checkpoint.load={tmp_path}/typo"))
    assert f"checkpoint.load={tmp_path}/typo holds no checkpoint: starting at step 0" in said


def test_with_the_newest_checkpoint_damaged_the_advice_leads_on(pretrain, tmp_path):
    _said(pretrain(tmp_path))
    newest = tmp_path / "checkpoints/step_00000002"
    largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    said = pretrain(tmp_path, "train.train_iters=3").error()
    assert f"{newest} is damaged: {largest.name} changed after it was saved" in said
    assert f"write step_00000001 into {tmp_path}/checkpoints/LATEST to go on from there" in said
    (tmp_path / "checkpoints/LATEST").write_text("step_00000001")
    said = _said(pretrain(tmp_path, "train.train_iters=3"))
    assert "continuing after step 1" in said
    assert len(metrics(tmp_path)) == 3


def test_a_folder_that_another_run_writes_to_is_refused_before_anything_is_changed(
    pretrain, tmp_path
):
    with held(tmp_path) as (process, _):
        said = pretrain(tmp_path).error()
    assert f"checkpoint.save={tmp_path} is in use: process {process.pid} on" in said
    assert not (tmp_path / "metrics.jsonl").exists()
    _said(pretrain(tmp_path))
    assert not (tmp_path / ".lock").exists()
