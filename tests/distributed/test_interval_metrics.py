"""What is written at log steps: the same on every layout, and under the same names everywhere."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dit.config_loading import read_config
from dit.data import dataset_sizes
from dit.train.checkpoint.state_dict import INTERVAL
from tests.launching import ROOT, SMALL, metrics, numbers, pretrain

SHARED = (
    *("train.train_iters=2", "train.eval_interval=0", "train.global_batch_size=2"),
    *("model.num_attention_heads=4", "dataset.task_encoder_seq_length=512"),
    *("optimizer.lr=1e-3", "scheduler.lr_warmup_iters=0"),
)
NAMES = ("loss_q", "grad_norm_", "weight_norm", "update_ratio", "ema_distance", "tokens_per_sample")


@pytest.mark.slow
def test_interval_metrics_are_those_of_one_process(tmp_path):
    layouts = {
        "one": (1, ()),
        "stages": (2, ("model.pipeline_model_parallel_size=2",)),
        "tensor_context": (
            4,
            (
                *("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
                *("model.context_parallel_size=2", "ddp.use_distributed_optimizer=false"),
            ),
        ),
    }
    found = {}
    for name, (nproc, settings) in layouts.items():
        folder = tmp_path / name
        pretrain(folder, *SHARED, *settings, nproc=nproc, config="dit_debug.yaml")
        found[name] = [
            {k: v for k, v in line.items() if k.startswith(NAMES)} for line in metrics(folder)
        ]
    assert len(found["one"][0]) >= 5 + 6 + 3 + 4 - 2  # a fifth of the levels may have no sample
    for name in ("stages", "tensor_context"):
        for mine, reference in zip(found[name], found["one"], strict=True):
            assert mine.pop("tokens_per_sample") == reference["tokens_per_sample"]
            reference = {k: v for k, v in reference.items() if k != "tokens_per_sample"}
            assert mine == pytest.approx(reference, rel=1e-5, abs=1e-9), name


def test_samples_of_a_blend_are_counted_across_a_stop(enter, digits, tmp_path):
    again, folder = tmp_path / "again", tmp_path / "run"
    shutil.copytree(digits, again)
    blend = f"dataset.blend=[{{path: {digits}, weight: 3}}, {{path: {again}}}]"
    asked = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, "dataset.path=null", blend)
    asked += ("dataset.num_workers=0", "train.eval_interval=0", f"checkpoint.save={folder}")
    for steps in (2, 5):
        more = (f"train.train_iters={steps}", "scheduler.lr_decay_iters=5")
        done = enter("pretrain_dit", *asked, *more)
        assert done.code == 0, done.said
    lines, sizes = metrics(folder), dataset_sizes(read_config(folder / "config.yaml").dataset)
    assert sizes.keys() == {"data", "again"}
    for line in lines:
        assert line["consumed_samples"] == sum(line[f"samples_{name}"] for name in sizes)
        assert all(line[f"epoch_{n}"] == line[f"samples_{n}"] / sizes[n] for n in sizes)
        assert "epoch" not in line
    assert lines[-1]["samples_data"] > 1.5 * lines[-1]["samples_again"] > 0
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"histograms": 0})
    board.Reload()
    for name in ("samples_data", "samples_again", "epoch_data", "epoch_again"):
        shown = [(point.step, point.value) for point in board.Scalars(name)]
        assert shown == [(n, pytest.approx(line[name])) for n, line in enumerate(lines, start=1)]
    (length,) = {longest for line in lines for longest, _ in line["tokens_per_sample"]}
    counts = [line["tokens_per_sample"][0][1] for line in lines]  # digits are of one size
    before = [0, *(line["consumed_samples"] for line in lines)]
    assert counts == [after - first for first, after in pairwise(before)]
    for histogram, count in zip(board.Histograms("tokens_per_sample"), counts, strict=True):
        assert histogram.histogram_value.bucket[-1] == count
        assert histogram.histogram_value.bucket_limit[-1] == length


def test_a_renamed_folder_of_a_blend_keeps_its_counts(enter, digits, tmp_path):
    folder, counts = tmp_path / "run", []
    for steps, name in ((1, "again"), (2, "other")):
        if (tmp_path / "again").exists():
            (tmp_path / "again").rename(tmp_path / name)
        else:
            shutil.copytree(digits, tmp_path / name)
        blend = f"dataset.blend=[{{path: {digits}}}, {{path: {tmp_path / name}}}]"
        asked = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, "dataset.path=null", blend)
        asked += ("dataset.num_workers=0", "train.eval_interval=0", f"checkpoint.save={folder}")
        done = enter(
            "pretrain_dit", *asked, f"train.train_iters={steps}", "scheduler.lr_warmup_iters=0"
        )
        assert done.code == 0, done.said
        assert ("other names than in the checkpoint (again -> other)" in done.said) == (steps == 2)
        counts.append(metrics(folder)[-1][f"samples_{name}"])
    assert 0 < counts[0] < counts[1]


TENSOR = ("model.tensor_model_parallel_size=2",)
STOPPED = ("dataset.num_workers=0", "train.eval_interval=0", "checkpoint.keep_last=9")
STOPPED += (
    "train.train_iters=8",
    "train.global_batch_size=2",
    "logger.log_interval=4",
    "checkpoint.save_interval=3",
)


def _back_to(step: int, folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    for later in (to / "checkpoints").glob("step_*"):
        if int(later.name.partition("_")[2]) > step:
            shutil.rmtree(later)
    (to / "checkpoints/LATEST").write_text(f"step_{step:08d}")
    return to


@pytest.mark.slow
def test_a_run_that_stopped_between_log_steps_writes_what_one_that_did_not_writes(
    enter, digits, tmp_path
):
    """Stopped after steps 3 and 6, where it logs every 4th; after 6 two tensor ranks go on, too."""
    asked = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, *STOPPED)
    asked += (f"dataset.path={digits}",)
    done = enter("pretrain_dit", *asked, f"checkpoint.save={tmp_path / 'whole'}")
    assert done.code == 0, done.said
    wanted = numbers(tmp_path / "whole")
    assert [n for n, line in enumerate(wanted, 1) if "tokens_per_sample" in line] == [4, 8]
    for step in (3, 6):
        folder = _back_to(step, tmp_path / "whole", tmp_path / str(step))
        done = enter("pretrain_dit", *asked, f"checkpoint.save={folder}")
        assert done.code == 0 and f"continuing after step {step}" in done.said
        assert numbers(folder) == wanted

    folder = _back_to(6, tmp_path / "whole", tmp_path / "two")
    pretrain(folder, *STOPPED, f"dataset.path={digits}", *TENSOR, nproc=2)
    last = numbers(folder)[-1]
    assert last["tokens_per_sample"] == wanted[-1]["tokens_per_sample"]
    levels = {n: value for n, value in wanted[-1].items() if n.startswith("loss_q")}
    assert levels and {n: last[n] for n in levels} == pytest.approx(levels, rel=1e-5)

    older = _back_to(6, tmp_path / "whole", tmp_path / "older")
    (older / "checkpoints/step_00000006" / INTERVAL).unlink()
    (older / "checkpoints/step_00000006/manifest.json").unlink()  # it names the file
    done = enter("pretrain_dit", *asked, f"checkpoint.save={older}")
    assert done.code == 0, done.said
    assert numbers(older)[-1]["loss"] == wanted[-1]["loss"]
