"""Weights & Biases without an account: offline mode writes beside the run."""

from __future__ import annotations

import pytest

from tests.launching import metrics, pretrain


@pytest.mark.slow
def test_offline_run_continues_under_the_same_identity(digits, tmp_path):
    pytest.importorskip("wandb")
    shared = (f"dataset.path={digits}", "train.eval_interval=0", "logger.wandb_project=x")
    said = pretrain(tmp_path, *shared, "train.train_iters=3").stdout
    identity = (tmp_path / "wandb_id").read_text()
    pretrain(tmp_path, *shared, "train.train_iters=5", "scheduler.lr_decay_iters=5")
    assert (tmp_path / "wandb_id").read_text() == identity
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    written = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}"))
    assert written
    assert all(list(place.glob("*.wandb")) for place in written)
    assert "step 3/3" in said
