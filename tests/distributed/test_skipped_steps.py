"""A sample whose loss overflows: its step is skipped on every rank, and the run goes on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch

from dit.config_loading import load_config, read_config
from dit.train.optimizer.update import learning_rate
from tests.launching import ROOT, SMALL, command, metrics, numbers, run
from tests.shard_edits import SHARD, edited

STEPS = 12  # of 32 digits; a pass has 215
LAYOUT = ("model.tensor_model_parallel_size=2", "train.global_batch_size=2")


@pytest.fixture(scope="module")
def poisoned(digits, tmp_path_factory) -> Path:
    """The first sample is finite, its squared error is not."""

    def change(tensors):
        huge = torch.full_like(tensors["latent"], 3e38, dtype=torch.bfloat16)
        return tensors | {"latent": huge}

    folder = tmp_path_factory.mktemp("poisoned") / "data"
    return edited(digits, folder, change, count=1)


def _train(data: Path, folder: Path, *more: str):
    config = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL, *LAYOUT)
    places = (f"dataset.path={data}", f"checkpoint.save={folder}", "train.eval_interval=0")
    steps = (f"scheduler.lr_decay_iters={STEPS}", "dataset.num_workers=0")
    return run(command("pretrain_dit.py", *config, *places, *steps, *more, nproc=4))


def _first_key(data: Path) -> str:
    with tarfile.open(data / SHARD) as tar:
        return tar.getnames()[0].partition(".")[0]


@pytest.mark.slow
def test_the_step_is_skipped_by_all_ranks_counted_and_named(poisoned, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = _train(poisoned, whole, f"train.train_iters={STEPS}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(whole)
    bad = [line["step"] for line in lines if line["skipped"]]
    assert 1 <= len(bad) <= 2  # passes begun
    assert lines[-1]["skipped_steps"] == len(bad)

    config, updates = load_config(read_config(whole / "config.yaml")), 0
    for line in lines:  # the schedule counts updates, data and step go on
        assert line["lr"] == learning_rate(config, updates + 1)
        updates += not line["skipped"]
        assert (line["loss"] is None) == line["skipped"]
        assert line["consumed_samples"] == 32 * line["step"]

    skips = [json.loads(line) for line in (whole / "skipped_samples.jsonl").open()]
    assert [skip["step"] for skip in skips] == bad
    for skip in skips:
        assert skip["because"] == "loss"
        (key,) = skip["keys"]
        assert key.endswith(_first_key(poisoned))
        assert f"step {skip['step']} skipped: loss of 1 sample is not finite: {key}" in done.stdout

    # As many in a row as are allowed end the run with a checkpoint, and a resume remembers.
    again = (f"train.train_iters={STEPS}", "train.max_skipped_steps=1")
    done = _train(poisoned, parts, *again)
    assert done.returncode == 1
    assert "1 steps in a row were skipped, as many as train.max_skipped_steps allows" in done.stderr
    assert f"Step {bad[0]}: loss of 1 sample is not finite" in done.stderr
    assert (parts / "checkpoints/LATEST").read_text() == f"step_{bad[0]:08d}"
    done = _train(poisoned, parts, f"train.train_iters={STEPS}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(parts) == numbers(whole)
    named = [(folder / "skipped_samples.jsonl").read_text() for folder in (parts, whole)]
    assert named[0] == named[1]
