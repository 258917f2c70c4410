"""Runs that validate: what they write, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.entering import Enter
from tests.launching import ROOT, SMALL, metrics


@pytest.fixture
def trained(enter: Enter, digits: Path, tmp_path: Path):
    """Lines of metrics.jsonl and checksums of the last weights of a run of four steps."""

    def call(name: str, *more: str) -> tuple[list[dict], dict]:
        folder = tmp_path / name
        config = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, "dataset.num_workers=0")
        places = (f"dataset.path={digits}", f"checkpoint.save={folder}")
        steps = ("train.train_iters=4", "checkpoint.save_interval=2", "checkpoint.keep_last=1")
        done = enter("pretrain_dit", *config, *places, *steps, *more)
        assert done.code == 0, done.said
        files = json.loads((folder / "checkpoints/step_00000004/manifest.json").read_text())
        sums = {n: f["sha256"] for n, f in files["files"].items() if n.endswith(".distcp")}
        return metrics(folder), sums

    return call


def test_training_with_and_without_validation_is_the_same_to_the_last_bit(trained, digits):
    sets = f"validation.sets=[{{name: again, path: {digits}}}]"
    validating = ("train.eval_interval=2", "train.eval_iters=2", "validation.at_start=true", sets)
    lines, weights = trained("with", *validating)
    plain, same = trained("without", "train.eval_interval=0")
    assert weights == same
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines[1:]] == [line[name] for line in plain]

    for line in (lines[0], lines[2], lines[4]):
        kinds = {n.removeprefix("val_loss") for n in line if n.startswith("val_loss")}
        plain_kinds = {kind for kind in kinds if "ema" not in kind}
        assert plain_kinds == {"", "_q10", "_q30", "_q50", "_q70", "_q90", "_image_4"}
        for kind in kinds:
            assert line[f"val_again_loss{kind}"] == line[f"val_loss{kind}"]
        levels = [line[f"val_loss_q{percent}"] for percent in (10, 30, 50, 70, 90)]
        assert line["val_loss"] == pytest.approx(sum(levels) / 5)
    assert not any("val" in name for line in (lines[1], lines[3]) for name in line)


def test_the_checkpoint_with_the_lowest_validation_loss_stays(trained, enter, tmp_path):
    # Steps that are far too large after the second.
    worse = ("optimizer.lr=0.5", "optimizer.min_lr=0.5", "scheduler.lr_warmup_iters=0")
    lines, _ = trained("run", "train.eval_interval=2", "train.eval_iters=1", *worse)
    assert lines[3]["val_loss_ema"] > lines[1]["val_loss_ema"]
    places = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in places.glob("step_*")) == ["step_00000002", "step_00000004"]
    assert (places / "LOWEST_VAL").read_text() == "step_00000002"
    best = ("--checkpoint_path", places / "LOWEST_VAL", "--output_dir", tmp_path / "pictures")
    done = enter("generate_dit", *best, "--prompt", "a handwritten one", "--num_steps", "1")
    assert done.code == 0, done.said
    assert "step_00000002" in (tmp_path / "pictures/samples.json").read_text()
