"""The way of conf/mlperf_digits.yaml, made short: digits, a target, its log, the same command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.cli.parser import main as data_prep
from tests.entering import Enter
from tests.launching import ROOT, metrics

SHORT = (
    *("model.num_layers=1", "model.num_single_layers=1", "model.hidden_size=32"),
    *("model.num_attention_heads=1", "train.eval_interval=2", "train.eval_iters=2"),
    *("train.train_iters=40", "checkpoint.save_interval=100", "scheduler.lr_warmup_iters=1"),
)


@pytest.mark.slow
def test_a_run_ends_at_its_target_and_the_same_command_says_so(
    enter: Enter, tmp_path: Path
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    packing = ("digits", "--side", "32", "--pixel_block", "2", "--pooled_text")
    assert data_prep([*packing, "--num_samples", "400", "--output_dir", str(data)]) == 0
    config = ("--config-file", ROOT / "conf/mlperf_digits.yaml", *SHORT)
    asked = (*config, f"dataset.path={data}", f"checkpoint.save={run}", "validation.target=1.9")
    done = enter("pretrain_dit", *asked)
    assert done.code == 0, done.said
    assert "validation.target=1.9 is reached at step" in done.said
    lines = metrics(run)
    last = lines[-1]
    assert last["step"] < 40 and last["val_loss"] <= 1.9
    assert all(line.get("val_loss", 9) > 1.9 for line in lines[:-1])
    assert last["target_samples"] == last["consumed_samples"] == 16 * last["step"]
    seconds = sum(line["step_time_s"] + line.get("validation_s", 0) for line in lines)
    assert last["target_s"] == pytest.approx(seconds)
    levels = [last[f"val_loss_k{k}"] for k in range(8)]  # 32 digits, 4 at each
    assert last["val_loss"] == pytest.approx(sum(levels) / 8)
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == [
        f"step_{last['step']:08d}"
    ]
    log = (run / "mlperf.log").read_text()
    facts = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.splitlines()]
    ended = facts[-1]
    assert (ended["key"], ended["metadata"]["status"]) == ("run_stop", "success")
    assert {f["value"] for f in facts if f["key"] == "eval_samples"} == {32}

    again = enter("pretrain_dit", *asked)
    assert again.code == 0 and "validation.target=1.9 was reached before" in again.said
    assert metrics(run) == lines and (run / "mlperf.log").read_text() == log
    # A lower target goes on from there.
    more = enter("pretrain_dit", *asked, "validation.target=0.01", "train.train_iters=42")
    assert more.code == 0 and "was reached" not in more.said
    assert metrics(run)[-1]["step"] == 42
    assert '"status": "aborted"' in (run / "mlperf.log").read_text()
